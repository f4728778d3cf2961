"""Answers judged by hand, with the graders in the real guest environment."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys

import pytest

from algo.reward.math_reward import MathReward
from algo.reward.maths.grader import GRADER_MODULES
from sandbox import Sandbox, SandboxConfig, Tier
from tests.golden.test_math_pairs import PAIRS
from tests.support.algo_fakes import trajectory
from tests.support.math_tables import Pair
from tests.support.paths import ROOT

MATH_VERIFY = """
import json, sys
from algo.reward.maths.guest.math_verify_judge import read, same
print(json.dumps([same(read(reference), read(answer)) for answer, reference in json.load(sys.stdin)]))
"""
GRADER = SandboxConfig(slots=2, tiers=(Tier(name="grader", preload=GRADER_MODULES),))


def boxed(answer: str, reference: str):
    return trajectory(f"<answer>\\boxed{{{answer}}}</answer>", answer=reference)


async def test_the_reward_judges_every_pair_as_the_author() -> None:
    """In the real sandbox, all at once; the report lists every row that is judged otherwise."""
    wrong: list[Pair] = []
    async with Sandbox(GRADER) as box:
        reward = MathReward(runner=box)

        async def judge(pair: Pair) -> None:
            if await reward(boxed(pair.answer, pair.reference)) != float(pair.right):
                wrong.append(pair)

        async with asyncio.TaskGroup() as tasks:
            for pair in PAIRS:
                tasks.create_task(judge(pair), name=f"judge {pair.answer}")
        assert wrong == []
        assert reward.grader is not None
        assert set(reward.grader.counts) == {"right", "wrong"}


async def test_math_verify_may_judge_instead() -> None:
    async with Sandbox(GRADER) as box:
        strict, generous = MathReward(runner=box), MathReward(runner=box, judge="math-verify")
        for answer, reference, as_strict, as_math_verify in (
            (r"\frac{2}{4}", r"\frac{1}{2}", 1.0, 1.0),
            ("-1,234", "-1234", 1.0, 1.0),
            (r"13 \text{ or more}", "13", 0.0, 1.0),
            ("0.333333", r"\frac{1}{3}", 0.0, 1.0),
            ("E: rising costs", "E", 1.0, 0.0),
            ("__import__('os')._exit(0)", "1", 0.0, 0.0),
        ):
            rollout = boxed(answer, reference)
            assert (await strict(rollout), await generous(rollout)) == (as_strict, as_math_verify), answer


@pytest.mark.campaign
def test_the_page_counts_how_often_math_verify_errs() -> None:
    """In algo/README.md; MathReward's own column is the first test here."""
    asked = json.dumps([(pair.answer, pair.reference) for pair in PAIRS])
    command = [f"{sys.prefix}-guest/bin/python", "-c", MATH_VERIFY]
    done = subprocess.run(command, input=asked, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    errors = [pair.right for pair, right in zip(PAIRS, json.loads(done.stdout), strict=True) if right is not pair.right]
    page = (ROOT / "algo" / "README.md").read_text()
    rows = re.findall(r"^\| (?:wrong|right) ones, \w+ \| (\d+) \| (\d+) \| 0 \|$", page, re.MULTILINE)
    in_all = [pair.right for pair in PAIRS]
    assert [(int(answers), int(wrong)) for answers, wrong in rows] == [
        (in_all.count(right), errors.count(right)) for right in (False, True)
    ]
