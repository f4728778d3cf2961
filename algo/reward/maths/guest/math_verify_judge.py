"""Judges an answer by Math-Verify as it comes, for figures that are comparable with others'."""

from __future__ import annotations

from typing import Any

import math_verify

from algo.reward.maths.guest.verdict import NUMBER, grade

# Math-Verify's parser evaluates arithmetic.
ARITHMETIC = rf"(?:{NUMBER}|(?:Add|Mul|Pow) ?\(|evaluate ?= ?False|[-+*/(), ])+"


def read(latex: str) -> list[Any]:
    """Returns what Math-Verify makes of a box. The sandbox has limits of its own, so its alarms are off."""
    parsed: list[Any] = math_verify.parse(rf"\boxed{{{latex}}}", parsing_timeout=None)
    return parsed


def same(expected: list[Any], answer: list[Any]) -> bool:
    return bool(math_verify.verify(expected, answer, timeout_seconds=None))


def main() -> None:
    grade(read, same, allowed=ARITHMETIC)
