"""Says whether two results of a bench differ: ratios with intervals, and verdicts for the table as a whole.

Rounds of two checkouts that were run in turns are compared in pairs: what the machine does in an hour then concerns
both alike. Other results are compared as they are (Welch's t on logarithms): there the hour is part of the difference,
and where rounds drift by more than they scatter, half of the verdicts are about the hour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import numpy as np

from algo.eval_stats import student_p
from bench.measuring.comparable import obstacles
from bench.measuring.result import Result
from bench.measuring.terminal import say, table

LEAST_ROUNDS = 3
# Student's t for an interval of 95 %, by degrees of freedom from 1.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)

Samples = Mapping[str, Sequence[float]]  # name of a figure -> its rounds


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A figure of B over that of A.

    low, high: its 95 % interval. shows: the smallest change that as many rounds with this spread show. p: how often
    rounds without a difference look so. sure: p is small enough for one figure among those of its table.
    """

    metric: str
    ratio: float
    low: float
    high: float
    shows: float
    rounds: int
    p: float
    sure: bool = True

    @property
    def verdict(self) -> str:
        if self.low <= 1 <= self.high:
            return "same"
        if not self.sure:
            return "unsure"
        return "B is larger" if self.ratio > 1 else "B is smaller"


def difference(metric: str, a: Sequence[float], b: Sequence[float], *, paired: bool) -> Difference:
    """Compares positive samples, one for each round. paired: the i-th of both were run one after the other.

    >>> same = difference("s", [1.0, 1.1, 0.9, 1.05], [1.0, 1.1, 0.9, 1.05], paired=True)
    >>> same.verdict, same.ratio
    ('same', 1.0)
    """
    logs_a, logs_b = np.log(a), np.log(b)
    if paired:
        logs = logs_b - logs_a
        spread, freedom = float(logs.std(ddof=1)) / math.sqrt(len(logs)), float(len(logs) - 1)
        middle = float(logs.mean())
    else:
        parts = float(logs_a.var(ddof=1)) / len(a), float(logs_b.var(ddof=1)) / len(b)
        spread = math.sqrt(sum(parts))
        freedom = sum(parts) ** 2 / max(1e-300, parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
        middle = float(logs_b.mean() - logs_a.mean())
    half = _t(freedom) * spread
    return Difference(
        metric=metric,
        ratio=math.exp(middle),
        low=math.exp(middle - half),
        high=math.exp(middle + half),
        shows=math.exp(half) - 1,
        rounds=min(len(a), len(b)),
        p=student_p(middle / spread, freedom) if spread else float(middle == 0),
    )


def for_the_table(differences: Sequence[Difference], level: float = 0.05) -> list[Difference]:
    """Says which differences are sure when all of a table are looked at, in the order given. Source: Holm (1979).

    Chance then makes one sure in a table without any difference as seldom as `level`, whatever depends on what.
    """
    by_p = sorted(range(len(differences)), key=lambda index: differences[index].p)
    passed = takewhile(
        lambda ranked: differences[ranked[1]].p <= level / (len(differences) - ranked[0]), enumerate(by_p)
    )
    sure = {index for _, index in passed}
    return [replace(each, sure=index in sure) for index, each in enumerate(differences)]


def compared(a: Samples, b: Samples, *, paired: bool, metric: str = "") -> list[Difference]:
    """Compares the figures of which both have enough rounds. Raises ValueError where there is none."""
    differences = []
    for name, ours in a.items():
        theirs = b.get(name, ())
        enough = min(len(ours), len(theirs)) >= LEAST_ROUNDS and (not paired or len(ours) == len(theirs))
        if enough and min(*ours, *theirs) > 0 and metric in ("", name):
            differences.append(difference(name, ours, theirs, paired=paired))
    if not differences:
        raise ValueError(
            f"nothing to compare{f' of {metric}' if metric else ''}: both need {LEAST_ROUNDS} rounds or more of it. "
            f"Fix: rounds=5; there is: {', '.join(a) or 'none'}"
        )
    return for_the_table(differences)


def show(differences: Sequence[Difference]) -> None:
    rows = [
        [
            each.metric,
            f"{each.ratio:.3f}",
            f"[{each.low:.3f}, {each.high:.3f}]",
            each.verdict,
            f"{100 * each.shows:.1f} %",
            str(each.rounds),
        ]
        for each in differences
    ]
    table("B against A", ["metric", "B / A", "95 % interval", "verdict", "shows", "rounds"], rows)
    print("verdict: same, where the interval holds 1; unsure, where only chance among so many figures may leave it out")
    print("shows: the smallest change that as many rounds with this spread would have shown")


def baseline(path: Path, metric: str) -> Result:
    """Reads a result that a gate compares with. Raises ValueError where it has too few rounds of the metric."""
    result = Result.read(path)
    known = result.flat()
    if len(known.get(metric, ())) < LEAST_ROUNDS:
        raise ValueError(f"{path} has fewer than {LEAST_ROUNDS} rounds of {metric}. Fix: one of {', '.join(known)}")
    return result


def gate(before: Result, result: Result, *, metric: str, most: float) -> int:
    """Returns 1 where the metric has surely grown by more than `most`, a share; negative: has shrunk by more.

    Raises ValueError where the two must not be compared, or the result has too few rounds to say so.
    """
    if reasons := obstacles(before, result):
        raise ValueError(f"the gate cannot judge {metric} (A is the baseline): {'; '.join(reasons)}")
    [judged] = compared(before.flat(), result.flat(), paired=False, metric=metric)
    show([judged])
    worse = judged.low > 1 + most if most >= 0 else judged.high < 1 + most
    if worse:
        say(f"{metric} is worse than the baseline's by more than {100 * abs(most):g} %")
    return int(worse)


def _t(freedom: float) -> float:
    """Returns Student's t for as many degrees of freedom, rounded down."""
    return _T[max(1, min(len(_T), int(freedom))) - 1]
