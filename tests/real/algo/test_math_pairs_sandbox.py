"""Answers judged by hand, with the grader in the real sandbox."""

from __future__ import annotations

import asyncio

from algo.reward.grade_math import GRADER_MODULES
from algo.reward.math_reward import MathReward
from sandbox import Sandbox, SandboxConfig, Tier
from tests.golden.test_math_pairs import PAIRS
from tests.support.algo_fakes import trajectory
from tests.support.math_tables import Pair


async def test_the_reward_judges_every_pair_as_the_author() -> None:
    """In the real sandbox, all at once; the report lists every row that is judged otherwise."""
    wrong: list[Pair] = []
    async with Sandbox(SandboxConfig(slots=2, tiers=(Tier(name="grader", preload=GRADER_MODULES),))) as box:
        reward = MathReward(runner=box)

        async def judge(pair: Pair) -> None:
            rollout = trajectory(f"<answer>\\boxed{{{pair.answer}}}</answer>", answer=pair.reference)
            if await reward(rollout) != float(pair.right):
                wrong.append(pair)

        async with asyncio.TaskGroup() as tasks:
            for pair in PAIRS:
                tasks.create_task(judge(pair), name=f"judge {pair.answer}")
        assert wrong == []
        assert reward.grader is not None
        assert set(reward.grader.counts) == {"right", "wrong"}
