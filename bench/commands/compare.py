"""Two runs of a bench: is there a difference?

    python -m bench compare A.json B.json [--metric M]
    python -m bench compare NAME --other DIR [--rounds 7] [options of the bench]

Of each figure that both have, the ratio B / A with a 95 % interval from the rounds, and a verdict. Rounds of two
checkouts that were run in turns are compared in pairs: what the machine does in an hour then concerns both alike. Two
files are compared as they are (Welch's t on logarithms): there the hour is part of the difference, and where rounds
drift by more than they scatter, half of the verdicts are about the hour. "same" means that the interval holds 1. One
interval in twenty leaves 1 out by chance, so a verdict has to hold for the table as a whole (Holm, 1979); "unsure" is a
figure whose own interval leaves 1 out and that does not pass this. The column `shows` is the smallest change that so
many rounds would have shown.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from algo.eval_stats import student_p
from bench.measuring.report import say, table

LEAST_ROUNDS = 3
# Student's t for an interval of 95 %, by degrees of freedom from 1.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """ratio: B / A, its interval; shows: the smallest change that as many rounds with this spread show; p: how often
    rounds without a difference look so; sure: that p is small enough for one figure among those of its table.
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
    """Of positive samples, one for each round. paired: the i-th of both were run one after the other.

    >>> found = difference("s", [1.0, 1.1, 0.9, 1.05], [1.0, 1.1, 0.9, 1.05], paired=True)
    >>> found.verdict, found.ratio
    ('same', 1.0)
    """
    logs_a, logs_b = np.log(a), np.log(b)
    if paired:
        logs = logs_b - logs_a
        spread, freedom = logs.std(ddof=1) / math.sqrt(len(logs)), float(len(logs) - 1)
        middle = float(logs.mean())
    else:
        parts = logs_a.var(ddof=1) / len(a), logs_b.var(ddof=1) / len(b)
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


def for_the_table(found: Sequence[Difference], level: float = 0.05) -> list[Difference]:
    """Says which differences are sure when all of a table are looked at, in the order given. Source: Holm (1979).

    Chance then makes one sure in a table without any difference as seldom as `level`, whatever depends on what.
    """
    by_p = sorted(range(len(found)), key=lambda index: found[index].p)
    passed = takewhile(lambda ranked: found[ranked[1]].p <= level / (len(found) - ranked[0]), enumerate(by_p))
    sure = {index for _, index in passed}
    return [replace(each, sure=index in sure) for index, each in enumerate(found)]


def _t(freedom: float) -> float:
    """Rounded up: with fewer degrees of freedom than there are, and beyond the table with its last."""
    return _T[max(1, min(len(_T), int(freedom))) - 1]


def differences(a: Mapping[str, Any], b: Mapping[str, Any], *, paired: bool, metric: str = "") -> list[Difference]:
    """Of the figures that both have samples of. Raises ValueError where there is nothing to compare."""
    if a["bench"] != b["bench"]:
        raise ValueError(f"{a['bench']} and {b['bench']} are two benches")
    found = []
    for name, ours in a.get("samples", {}).items():
        theirs = b.get("samples", {}).get(name, ())
        enough = min(len(ours), len(theirs)) >= LEAST_ROUNDS and (not paired or len(ours) == len(theirs))
        if enough and min(*ours, *theirs) > 0 and metric in ("", name):
            found.append(difference(name, ours, theirs, paired=paired))
    if not found:
        raise ValueError(
            f"nothing to compare{f' of {metric}' if metric else ''}: both need {LEAST_ROUNDS} rounds or more of it. "
            f"Fix: --rounds 5; there is: {', '.join(a.get('samples', {})) or 'none'}"
        )
    return for_the_table(found)


def gate(baseline: Mapping[str, Any], result: Mapping[str, Any], *, metric: str, most: float) -> int:
    """The exit code: 1 where the metric has surely grown by more than `most` (a share; negative: has shrunk)."""
    [found] = differences(baseline, result, paired=False, metric=metric)
    show([found])
    worse = found.low > 1 + most if most >= 0 else found.high < 1 + most
    if worse:
        say(f"{metric} is worse than the baseline's by more than {100 * abs(most):g} %")
    return int(worse)


def load(path: Path) -> dict[str, Any]:
    """Raises ValueError naming a file that is no result of a bench."""
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or "bench" not in found:
            raise ValueError("no result of a bench")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return found


def show(found: Sequence[Difference]) -> None:
    rows = [
        [
            each.metric,
            f"{each.ratio:.3f}",
            f"[{each.low:.3f}, {each.high:.3f}]",
            each.verdict,
            f"{100 * each.shows:.1f} %",
            str(each.rounds),
        ]
        for each in found
    ]
    table("B against A", ["metric", "B / A", "95 % interval", "verdict", "shows", "rounds"], rows)


def in_turns(name: str, other: Path, rounds: int, options: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of this checkout and of another, one round of each at a time, the one that begins by turns."""
    results: list[list[dict[str, Any]]] = [[], []]
    places = [Path.cwd(), other]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                say(f"round {number + 1} of {rounds}, {'AB'[which]}: {places[which]}")
                path = Path(folder) / f"{number}-{which}.json"
                words = [sys.executable, "-m", "bench", name, "--rounds", "1", *options, "--json", str(path)]
                subprocess.run(words, cwd=places[which], check=True, stdout=subprocess.DEVNULL)
                results[which].append(load(path))
    return _joined(results[0]), _joined(results[1])


def _joined(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = {name for result in results for name in result.get("samples", {})}
    samples = {
        name: [value for result in results for value in result["samples"].get(name, ())] for name in sorted(names)
    }
    return {**results[-1], "samples": samples}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench compare", description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", help="two files, or the name of a bench")
    parser.add_argument("--other", type=Path, help="another checkout, with the same bench")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--metric", default="", help="of one figure only")
    options, further = parser.parse_known_args(argv)
    try:
        if options.other is None:
            if len(options.what) != 2 or further:
                parser.error("two files, or a bench and --other DIR")
            a, b = (load(Path(each)) for each in options.what)
            show(differences(a, b, paired=False, metric=options.metric))
            say(
                "The rounds of A and B were not run in turns: what the machine did at the time of each is part of the "
                f"ratio. To compare code: python -m bench compare {a['bench']} --other DIR"
            )
        else:
            a, b = in_turns(options.what[0], options.other, options.rounds, [*options.what[1:], *further])
            show(differences(a, b, paired=True, metric=options.metric))
    except (ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
