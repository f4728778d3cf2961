"""Compares two results of a bench, or two checkouts in turns: is there a difference?

    rocstar bench compare A.json B.json [metric=M]
    rocstar bench compare NAME other=DIR [rounds=7] [options of the bench]

Each figure that both have gets the ratio B / A with a 95 % interval from the rounds, and a verdict. "same" means that
the interval holds 1. One interval in twenty leaves 1 out by chance, so a verdict has to hold for the table as a whole
(Holm, 1979); "unsure" is a figure whose own interval leaves 1 out and that does not pass this. The column `shows` is
the smallest change that so many rounds would have shown.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bench.measuring.differences import LEAST_ROUNDS, compared, show
from bench.measuring.result import Result
from bench.measuring.terminal import say
from engine.console.options import Positional, Rest, parse
from sandbox.require import at_least, require


@dataclass(frozen=True, kw_only=True)
class Options:
    what: Annotated[tuple[str, ...], Positional("two results, or the name of a bench")]
    other: Annotated[Path | None, "another checkout that has the bench"] = None
    rounds: Annotated[int, "of each checkout"] = 7
    metric: Annotated[str, "compare this figure only, CASE/METRIC"] = ""
    fields: Annotated[tuple[str, ...], Rest("options of the bench")] = ()

    def __post_init__(self) -> None:
        if len(self.what) != (2 if self.other is None else 1):
            raise ValueError(f"what must be two results, or a bench with other=DIR, got {' '.join(self.what)!r}")
        require("rounds", self.rounds, at_least(LEAST_ROUNDS))


def main(argv: Sequence[str]) -> int:
    options = parse(Options, argv, program="rocstar bench compare", description=__doc__)
    try:
        if options.other is None:
            _files(*map(Path, options.what), metric=options.metric)
        else:
            _checkouts(options.what[0], options.other, options)
    except subprocess.CalledProcessError as error:
        print(f"error: a run ended with exit code {error.returncode}; see above", file=sys.stderr)
        return 1
    return 0


def _files(path_a: Path, path_b: Path, *, metric: str) -> None:
    a, b = Result.read(path_a), Result.read(path_b)
    if a.bench != b.bench:
        raise ValueError(f"{path_a} is of bench {a.bench}, {path_b} of {b.bench}. Fix: two results of one bench")
    for name, result in (("A", a), ("B", b)):
        around = f"others used {100 * result.environment.others:.0f} %"
        say(f"{name}: {result.machine}, {around}, {result.date}, commit {result.commit}")
    for field in sorted(a.config.keys() | b.config.keys()):
        if a.config.get(field) != b.config.get(field):
            say(f"{field} differs: {a.config.get(field)} in A, {b.config.get(field)} in B")
    show(compared(a.flat(), b.flat(), paired=False, metric=metric))
    say(
        "The rounds of A and B were not run in turns: what the machine did at the time of each is part of the ratio. "
        f"To compare code: rocstar bench compare {a.bench} other=DIR"
    )


def _checkouts(name: str, other: Path, options: Options) -> None:
    """Runs a round of each checkout at a time, the one that begins by turns; Ctrl-C compares the finished ones."""
    samples: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
    places = (Path.cwd(), other)
    try:
        for number in range(options.rounds):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            flat = {}
            for which in order:
                say(f"round {number + 1} of {options.rounds}, {'AB'[which]}: {places[which]}")
                flat[which] = _round(name, places[which], options.fields)
            for which in (0, 1):
                for figure, values in flat[which].items():
                    samples[which].setdefault(figure, []).extend(values)
    except KeyboardInterrupt:
        say("interrupted: the finished rounds follow")
    show(compared(*samples, paired=True, metric=options.metric))


def _round(name: str, checkout: Path, fields: Sequence[str]) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "bench", name, "rounds=1", *fields, f"json={path}"]
        subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.DEVNULL)
        return Result.read(path).flat()
