"""The reward for mathematics: 1 when the boxed answer equals the reference, else 0.

Invariants
- Strict: numbers are compared exactly (no tolerance, no percentages), only the boxed answer counts, and model output is
  never evaluated here.
- A truncated rollout gets 0; a rollout without an answer gets 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from algo.answer import boxed_answer
from engine.types import StopReason, Trajectory

_SPACING = re.compile(r"\\[,;:! ]|\s+|\$")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d*)?")
_INTEGER = re.compile(r"([+-]?)0*(\d+)\.?")
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class MathReward:
    """Grades a trajectory against `prompt.answer`.

    integers_only: the answer must be written as an integer, as the reference is (`13.0` is wrong for 13).
    An answer that is no number is right only when it is the same text, spacing aside.
    """

    integers_only: bool = False

    async def __call__(self, trajectory: Trajectory) -> float:
        if trajectory.stop is not StopReason.ANSWER or any(turn.truncated for turn in trajectory.turns):
            return 0.0
        answer = boxed_answer(trajectory.text)
        return 0.0 if answer is None else float(self.equal(answer, trajectory.prompt.answer))

    def equal(self, answer: str, reference: str) -> bool:
        """Whether the content of a box equals the reference."""
        written, expected = canonical(answer), canonical(reference)
        number = _INTEGER if self.integers_only else _NUMBER
        if number.fullmatch(written) and number.fullmatch(expected):
            return Decimal(written) == Decimal(expected)
        return not self.integers_only and written != "" and written == expected


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
