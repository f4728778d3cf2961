"""When a replica's log-probabilities are the learner's: how far they may be from them, by dtype and depth."""

import json

import numpy as np
import pytest

from engine.fleet.canary import ONE_TOKEN, CanaryFailed, compare, one_token_of, tolerance, tolerance_of
from engine.types import PublishedWeights

# (dtype, layers, mean, largest) between vLLM and the learner where nothing was wrong: the quick start's agent,
# SmolLM2-135M before and after 26 steps of training; in float32 the largest was measured, and the mean a quarter of it.
ORDINARY = [
    ("float32", 3, 2.4e-6, 9.5e-6),
    ("float32", 30, 1.2e-5, 4.8e-5),
    ("bfloat16", 3, 0.028, 0.234),
    ("bfloat16", 30, 0.079, 0.433),
]
# Where weights were wrong: a stale head and layer of the quick start's agent, swapped keys and values in the last of
# SmolLM2's layers, and one token that is far off.
BROKEN = [
    ("float32", 3, 1e-3, 1e-3),
    ("float32", 80, 1e-3, 1e-3),
    ("bfloat16", 3, 0.12, 0.76),
    ("bfloat16", 3, 0.16, 0.97),
    ("bfloat16", 30, 0.44, 3.3),
    ("bfloat16", 3, 0.03, 2.5),
]
LEARNER = np.linspace(-9, -0.1, 200, dtype=np.float32)


def replica_of(mean, largest):
    """Log-probabilities that differ so from the learner's, in both directions, one token most."""
    difference = np.full(len(LEARNER), (mean * len(LEARNER) - largest) / (len(LEARNER) - 1), np.float32)
    difference[::2] *= -1
    difference[17] = largest
    return LEARNER + difference


def judged(dtype, layers, mean, largest):
    weights = PublishedWeights("/w", 7, LEARNER)
    return compare(1, replica_of(mean, largest), weights, tolerance(dtype, layers=layers))


@pytest.mark.parametrize("ordinary", ORDINARY)
def test_rounding_passes_with_room_to_spare(ordinary):
    dtype, layers, mean, largest = ordinary
    assert judged(*ordinary) == pytest.approx((mean, largest), rel=0.1)
    assert judged(dtype, layers, 2 * mean, 2 * largest).mean_abs > mean


@pytest.mark.parametrize("broken", BROKEN)
def test_weights_that_are_partly_old_or_of_another_name_do_not_pass(broken):
    with pytest.raises(CanaryFailed, match="replica 1 after weight update 7"):
        judged(*broken)


def test_what_is_not_a_number_never_passes():
    weights, found = PublishedWeights("/w", 7, LEARNER), LEARNER.copy()
    found[3] = np.nan
    for allowed in (1.0, None):
        with pytest.raises(CanaryFailed):
            compare(1, found, weights, allowed)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_a_token_of_a_mixture_in_bfloat16_may_be_far_off_but_not_the_mean(tmp_path, name):
    """Rounding sends it to another expert: measured were 1.9 for a token where the mean was 0.037."""
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 3, name: 8}))
    assert one_token_of(tmp_path, "float32") == ONE_TOKEN
    weights, one_token = PublishedWeights("/w", 7, LEARNER), one_token_of(tmp_path, "bfloat16")
    bound = tolerance("bfloat16", layers=3)
    assert compare(1, replica_of(0.037, 1.9), weights, bound, one_token).max_abs == pytest.approx(1.9, rel=0.01)
    for mean, largest in ((0.08, 0.2), (np.nan, np.nan)):
        with pytest.raises(CanaryFailed):
            compare(1, replica_of(mean, largest), weights, bound, one_token)
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 3}))
    assert one_token_of(tmp_path, "bfloat16") == ONE_TOKEN


def test_without_a_tolerance_it_is_measured_and_not_judged():
    assert compare(1, replica_of(5.0, 50.0), PublishedWeights("/w", 7, LEARNER), None).mean_abs == pytest.approx(5.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_four_times_the_layers_may_differ_twice_as_far(dtype):
    assert tolerance(dtype, layers=48) == pytest.approx(2 * tolerance(dtype, layers=12))


def test_the_depth_is_read_from_the_checkpoint(tmp_path):
    file = tmp_path / "config.json"
    for fields in ({"num_hidden_layers": 30}, {"text_config": {"num_hidden_layers": 30}}):
        file.write_text(json.dumps(fields))
        assert tolerance_of(tmp_path, "float32") == tolerance("float32", layers=30)
    file.write_text(json.dumps({"n_layer": 30}))
    with pytest.raises(ValueError, match=r"config\.json: num_hidden_layers must be .*got None"):
        tolerance_of(tmp_path, "float32")


def test_a_dtype_that_was_never_measured_is_refused():
    with pytest.raises(ValueError, match=r"dtype must be float32 or bfloat16.*got 'float16'"):
        tolerance("float16", layers=1)
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        tolerance("float32", layers=0)
