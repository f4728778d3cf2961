import numpy as np
import pytest
from algo_fakes import trajectory
from algo_golden import name, rows

from algo.overlong import overlong_penalty
from algo.select import KeepAll, KeepFinished, RandomSubset
from engine.types import StopReason

SOFT = [row for row in rows("overlong") if row["params"]["definition"] != "filter_mask"]


@pytest.mark.parametrize("row", SOFT, ids=name)
def test_matches_golden_up_to_the_longest_length(row):
    params, inputs = row["params"], row["inputs"]
    longest = params["max_response_length"]
    beyond = 0
    for length, reward, theirs in zip(inputs["lengths"], inputs["rewards"], row["outputs"]["rewards"], strict=True):
        ours = reward + overlong_penalty(length, longest=longest, buffer=params["buffer"], factor=params["factor"])
        if length > longest:  # ours stays as in the paper; verl and AReaL go on falling, SkyRL gives reward 0
            beyond += 1
            assert ours == reward - params["factor"]
        else:
            assert ours == pytest.approx(theirs, rel=params["tol"], abs=params["tol"])
    assert beyond < len(inputs["lengths"])


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
