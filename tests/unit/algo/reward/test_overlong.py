import numpy as np
import pytest

from algo.group.selection import KeepAll, KeepFinished, RandomSubset
from algo.reward.overlong import overlong_penalty
from engine.types import StopReason
from tests.support.algo_fakes import trajectory
from tests.support.golden import name, rows

SOFT = [row for row in rows("overlong") if row["params"]["definition"] != "filter_mask"]


@pytest.mark.parametrize("row", SOFT, ids=name)
def test_matches_golden(row):
    params, inputs = row["params"], row["inputs"]
    limits = {"longest": params["max_response_length"], "buffer": params["buffer"], "factor": params["factor"]}
    ours = [
        reward + overlong_penalty(length, **limits)
        for length, reward in zip(inputs["lengths"], inputs["rewards"], strict=True)
    ]
    assert ours == pytest.approx(row["outputs"]["rewards"], rel=params["tol"], abs=params["tol"])


def test_beyond_the_longest_length_the_penalty_stays_as_in_the_paper():
    """verl and AReaL go on falling there, SkyRL sets the reward to 0."""
    assert [overlong_penalty(length, longest=16, buffer=8, factor=0.5) for length in (16, 17, 99)] == [-0.5] * 3


def test_a_buffer_outside_the_length_is_refused():
    for buffer in (0, 17):
        with pytest.raises(ValueError, match="buffer"):
            overlong_penalty(3, longest=16, buffer=buffer)


@pytest.mark.parametrize("row", rows("overlong", definition="filter_mask"), ids=name)
def test_what_a_limit_cut_off_is_filtered_as_in_golden(row):
    stops = {"length": StopReason.LENGTH, "abort": StopReason.DEADLINE, "stop": StopReason.ANSWER}
    group = [trajectory(reward=0.0, stop=stops[reason]) for reason in row["inputs"]["stop_reasons"]]
    kept = KeepFinished(KeepAll())(group, np.random.default_rng(0))
    assert kept == [index for index, mask in enumerate(row["outputs"]["loss_masks"]) if any(mask)]


def test_the_rest_is_selected_from_what_finished():
    stops = [StopReason.ANSWER, StopReason.LENGTH, StopReason.ANSWER, StopReason.TURNS, StopReason.ANSWER]
    group = [trajectory(reward=0.0, stop=stop) for stop in stops]
    assert KeepFinished(KeepAll())(group, np.random.default_rng(0)) == [0, 2, 4]
    kept = KeepFinished(RandomSubset(2))(group, np.random.default_rng(0))
    assert len(kept) == 2
    assert set(kept) < {0, 2, 4}
