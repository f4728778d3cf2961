"""Says whether two results of a bench may be compared at all: the same machine, the same options, nobody else there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.measuring.result import Result

ROUNDS_ONLY = "rounds"  # the option that may differ


def obstacles(a: Result, b: Result) -> list[str]:
    """Returns why the figures of A and B must not be compared, a reason each; none: they may be.

    Raises ValueError for results of different benches, which have no figure in common.
    """
    if a.bench != b.bench:
        raise ValueError(f"A is of bench {a.bench}, B of {b.bench}. Fix: two results of one bench")
    reasons = [f"{name} was disturbed: {result.disturbed}" for name, result in (("A", a), ("B", b)) if result.disturbed]
    if a.machine != b.machine and not (a.simulated and b.simulated):
        reasons.insert(0, f"A ran on {a.machine}, B on {b.machine}")
    return reasons + options_that_differ(a.config, b.config)


def options_that_differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Returns a line for each option but the number of rounds that A and B do not share.

    >>> options_that_differ({"steps": 8, "rounds": 3}, {"steps": 12, "rounds": 5})
    ['steps is 8 in A, 12 in B']
    """
    names = sorted((a.keys() | b.keys()) - {ROUNDS_ONLY})
    return [f"{name} is {a.get(name)} in A, {b.get(name)} in B" for name in names if a.get(name) != b.get(name)]
