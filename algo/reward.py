"""The reward for mathematics: 1 when the boxed answer equals the reference, else 0.

Invariants
- Strict: numbers are compared exactly (no tolerance; 5 % is 0.05, never 5), only the boxed answer counts.
- Model output is never evaluated here: what needs mathematics is decided by Math-Verify in the sandbox, numbers and
  equal texts are not sent there.
- A truncated rollout gets 0; a rollout without an answer gets 0; one that could not be graded gets no reward at all but
  GraderUnavailable (`algo.grade_math` says when that is).
"""

from __future__ import annotations

import re
from decimal import Decimal

from algo.answer import boxed_answer
from algo.grade_math import GRADER_LIMITS, MathGrader
from engine.ports import ToolRunner
from engine.types import StopReason, Trajectory
from sandbox.wire import Limits

_SPACING = re.compile(r"\\[,;:! ]|\s+|\$")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d*)?")
_INTEGER = re.compile(r"([+-]?)(?>0*(?=\d))(\d+)\.?")  # atomic: else it takes the square of the zeros
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)")


class MathReward:
    """Grades a trajectory against `prompt.answer`.

    integers_only: the answer must be written as an integer, as the reference is (`13.0` is wrong for 13).
    runner: a sandbox with GRADER_MODULES, where answers that are no numbers are compared as mathematics. Without one
    such an answer is right only when it is the same text, spacing aside.
    grader: what uses the runner; its `counts` say how the gradings in the sandbox ended.
    """

    def __init__(
        self, *, integers_only: bool = False, runner: ToolRunner | None = None, limits: Limits = GRADER_LIMITS
    ) -> None:
        if integers_only and runner is not None:
            raise ValueError("MathReward with integers_only compares texts: it takes no runner")
        self.integers_only = integers_only
        self.grader = None if runner is None else MathGrader(runner, limits)

    async def __call__(self, trajectory: Trajectory) -> float:
        """1.0 or 0.0. Raises GraderUnavailable."""
        if trajectory.stop is not StopReason.ANSWER or any(turn.truncated for turn in trajectory.turns):
            return 0.0
        answer, reference = boxed_answer(trajectory.text), trajectory.prompt.answer
        if answer is None:
            return 0.0
        right = self.equal(answer, reference)
        if right is None:
            assert self.grader is not None
            right = await self.grader.equal(answer, reference)
        return float(right)

    def equal(self, answer: str, reference: str) -> bool | None:
        """Whether the content of a box equals the reference, as far as the texts tell; None: ask the grader."""
        written, expected = canonical(answer), canonical(reference)
        number = _INTEGER if self.integers_only else _NUMBER
        if number.fullmatch(written) and number.fullmatch(expected):
            return Decimal(written) == Decimal(expected)
        if self.integers_only or written == "":
            return False
        return True if written == expected else None if self.grader else False


def canonical(text: str) -> str:
    """Without spacing and thousands separators; integers without leading zeros, plus sign and final period.

    >>> canonical("- 1{,}234"), canonical("033"), canonical("2.50"), canonical("(1,234)")
    ('-1234', '33', '2.50', '(1,234)')
    """
    text = _SPACING.sub("", text)
    if _THOUSANDS.fullmatch(text):
        text = text.replace("{,}", "").replace(",", "")
    integer = _INTEGER.fullmatch(text)
    if integer:
        sign, digits = integer.groups()
        return "-" + digits if sign == "-" and digits != "0" else digits
    return text
