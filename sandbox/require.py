"""Range checks of what a user configures: `require("steps", self.steps, at_least(1))`.

Relations between several fields are no rules of this kind: they are an `if` with an error of their own.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What a value must be, in words for the message, and whether it is."""

    text: str
    holds: Callable[[Any], bool]


def require(name: str, value: Any, rule: Rule) -> None:
    """Raises ValueError unless the rule holds, or if it cannot be applied to such a value.

    >>> require("steps", 0, at_least(1))
    Traceback (most recent call last):
    ValueError: steps must be at least 1, got 0
    """
    with suppress(TypeError):
        if rule.holds(value):
            return
    raise ValueError(f"{name} must be {rule.text}, got {value!r}")


def require_fields(owner: Any, rule: Rule, *names: str) -> None:
    """Raises ValueError unless the rule holds for each of these fields."""
    for name in names:
        require(name, getattr(owner, name), rule)


positive = Rule("positive", lambda value: value > 0)
finite = Rule("finite", math.isfinite)
true_or_false = Rule("True or False", lambda value: isinstance(value, bool))


def at_least(least: float) -> Rule:
    return Rule(f"at least {least}", lambda value: value >= least)


def whole(least: int) -> Rule:
    return Rule(f"a whole number of at least {least}", lambda value: isinstance(value, int) and value >= least)


def within(interval: str) -> Rule:
    """Returns the rule that a number lies in an interval; round brackets exclude its ends.

    >>> require("top_p", 0.0, within("(0, 1]"))
    Traceback (most recent call last):
    ValueError: top_p must be in (0, 1], got 0.0
    """
    low, high = map(float, interval[1:-1].split(","))
    above = operator.gt if interval[0] == "(" else operator.ge
    below = operator.lt if interval[-1] == ")" else operator.le
    return Rule(f"in {interval}", lambda value: above(value, low) and below(value, high))


def one_of(*values: Any) -> Rule:
    return Rule(f"one of {', '.join(map(repr, values))}", lambda value: value in values)


def none_or(rule: Rule) -> Rule:
    return Rule(f"None or {rule.text}", lambda value: value is None or rule.holds(value))
