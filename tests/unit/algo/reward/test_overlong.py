from dataclasses import replace

import numpy as np
import pytest

from algo.group.roc import RoC
from algo.group.selection import KeepAll, KeepFinished, RandomSubset
from algo.reward.overlong import OverlongPenalty, overlong_penalty
from engine.ports import Grade
from engine.types import StopReason
from tests.support.algo_fakes import trajectory


def test_beyond_the_longest_length_the_penalty_stays_as_in_the_paper():
    """verl and AReaL go on falling there, SkyRL sets the reward to 0."""
    assert [overlong_penalty(length, longest=16, buffer=8, factor=0.5) for length in (16, 17, 99)] == [-0.5] * 3


def test_a_buffer_outside_the_length_is_refused():
    for buffer in (0, 17):
        with pytest.raises(ValueError, match="buffer"):
            overlong_penalty(3, longest=16, buffer=buffer)


class Right:
    async def __call__(self, trajectory):
        return 1.0


@pytest.mark.parametrize(("sampled", "expected"), [(8, 1.0), (12, 0.75), (16, 0.5), (20, 0.5)])
async def test_a_reward_loses_for_the_tokens_that_were_sampled(sampled, expected):
    reward = OverlongPenalty(reward=Right(), longest=16, buffer=8, factor=0.5)
    marks_T = np.asarray([False] * 5 + [True] * sampled)
    assert await reward(replace(trajectory(), sampled_T=marks_T)) == expected
    with pytest.raises(ValueError, match=r"buffer .*17"):
        OverlongPenalty(reward=Right(), longest=16, buffer=17)


async def test_a_plain_function_is_a_reward_to_take_from():
    reward = OverlongPenalty(reward=lambda trajectory: True, longest=16, buffer=8)
    assert await reward(replace(trajectory(), sampled_T=np.asarray([True] * 12))) == 0.5


async def test_the_scores_of_a_reward_stay():
    class Scored:
        async def __call__(self, trajectory):
            return Grade(reward=1.0, scores={"style": 0.5})

    reward = OverlongPenalty(reward=Scored(), longest=16, buffer=8, factor=0.5)
    marks_T = np.asarray([False] * 5 + [True] * 12)
    found = await reward(replace(trajectory(), sampled_T=marks_T))
    assert found == Grade(reward=0.75, scores={"style": 0.5})


@pytest.mark.parametrize(("factor", "failures"), [(1.0, 3), (0.5, 0)])
def test_a_right_answer_that_loses_all_of_its_reward_is_a_failure_for_roc(factor, failures):
    """One short right answer and three as long as allowed: of failures their share is kept, and the one success."""
    penalty = overlong_penalty(16, longest=16, buffer=8, factor=factor)
    group = [trajectory(reward=reward) for reward in (1.0, *[1.0 + penalty] * 3)]
    kept = [RoC(keep=2)(group, np.random.default_rng(seed)) for seed in range(30)]
    assert all(0 in each for each in kept) is (failures > 0)


def test_the_rest_is_selected_from_what_finished():
    stops = [StopReason.ANSWER, StopReason.LENGTH, StopReason.ANSWER, StopReason.TURNS, StopReason.ANSWER]
    group = [trajectory(reward=0.0, stop=stop) for stop in stops]
    assert KeepFinished(KeepAll())(group, np.random.default_rng(0)) == [0, 2, 4]
    kept = KeepFinished(RandomSubset(2))(group, np.random.default_rng(0))
    assert len(kept) == 2
    assert set(kept) < {0, 2, 4}
