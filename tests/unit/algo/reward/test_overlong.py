import numpy as np
import pytest

from algo.group.selection import KeepAll, KeepFinished, RandomSubset
from algo.reward.overlong import overlong_penalty
from engine.types import StopReason
from tests.support.algo_fakes import trajectory


def test_beyond_the_longest_length_the_penalty_stays_as_in_the_paper():
    """verl and AReaL go on falling there, SkyRL sets the reward to 0."""
    assert [overlong_penalty(length, longest=16, buffer=8, factor=0.5) for length in (16, 17, 99)] == [-0.5] * 3


def test_a_buffer_outside_the_length_is_refused():
    for buffer in (0, 17):
        with pytest.raises(ValueError, match="buffer"):
            overlong_penalty(3, longest=16, buffer=buffer)


def test_the_rest_is_selected_from_what_finished():
    stops = [StopReason.ANSWER, StopReason.LENGTH, StopReason.ANSWER, StopReason.TURNS, StopReason.ANSWER]
    group = [trajectory(reward=0.0, stop=stop) for stop in stops]
    assert KeepFinished(KeepAll())(group, np.random.default_rng(0)) == [0, 2, 4]
    kept = KeepFinished(RandomSubset(2))(group, np.random.default_rng(0))
    assert len(kept) == 2
    assert set(kept) < {0, 2, 4}
