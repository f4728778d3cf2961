import pytest

from algo.reward.tool_errors import ToolErrorPenalty
from engine.ports import Grade
from tests.support.algo_fakes import trajectory


@pytest.mark.parametrize(
    ("outcomes", "expected"), [((), 1.0), (("ok",), 1.0), (("error", "ok"), 0.75), (("malformed",), 0.5)]
)
async def test_a_reward_loses_for_the_share_of_failed_calls(outcomes, expected):
    reward = ToolErrorPenalty(reward=lambda trajectory: 1.0, factor=0.5)
    assert await reward(trajectory(outcomes=outcomes)) == expected


async def test_the_scores_of_a_reward_stay():
    reward = ToolErrorPenalty(reward=lambda trajectory: Grade(reward=0.0, scores={"style": 0.5}), factor=0.5)
    assert await reward(trajectory(outcomes=("timeout",))) == Grade(reward=-0.5, scores={"style": 0.5})


def test_a_factor_that_takes_nothing_is_refused():
    with pytest.raises(ValueError, match=r"factor .*0"):
        ToolErrorPenalty(reward=lambda trajectory: 1.0, factor=0.0)
