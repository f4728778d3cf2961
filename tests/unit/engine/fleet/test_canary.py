"""When a replica's log-probabilities are the learner's: how far they may be from them, by dtype and depth."""

import json

import numpy as np
import pytest

from engine.fleet.canary import CanaryFailed, compare, tolerance, tolerance_of
from engine.types import PublishedWeights

# Between vLLM and the learner, where nothing was wrong: the quick start's agent, SmolLM2-135M before and after 26 steps
# of training, the tiny agent with bfloat16 on one side. What a stale head made at least: 0.38 at 12 layers.
ORDINARY = [
    ("float32", 3, 9.5e-6),
    ("float32", 30, 4.8e-5),
    ("float32", 30, 2.4e-4),
    ("bfloat16", 12, 0.05),
]
BROKEN = [("float32", 3, 1e-3), ("float32", 80, 1e-3), ("bfloat16", 12, 0.38)]


@pytest.mark.parametrize(("dtype", "layers", "ordinary"), ORDINARY)
def test_rounding_passes_with_room_to_spare(dtype, layers, ordinary):
    weights, allowed = (
        PublishedWeights("/w", 7, np.asarray([-1.0, -2.0, -3.0], np.float32)),
        tolerance(dtype, layers=layers),
    )
    found = weights.canary + np.float32(ordinary)
    assert compare(1, found, weights, allowed) == pytest.approx(ordinary, rel=0.1)
    assert allowed > 2 * ordinary


@pytest.mark.parametrize(("dtype", "layers", "broken"), BROKEN)
def test_weights_that_are_partly_old_do_not_pass(dtype, layers, broken):
    weights, allowed = (
        PublishedWeights("/w", 7, np.asarray([-1.0, -2.0, -3.0], np.float32)),
        tolerance(dtype, layers=layers),
    )
    with pytest.raises(CanaryFailed, match="replica 1 after weight update 7"):
        compare(1, weights.canary - np.float32(broken), weights, allowed)
    with pytest.raises(CanaryFailed):
        compare(1, weights.canary * np.float32(np.nan), weights, allowed)


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
