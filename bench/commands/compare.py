"""Compares two results of a bench, or two checkouts in turns: is there a difference?

    rocstar bench compare A.json B.json [metric=M]
    rocstar bench compare NAME other=DIR [rounds=7] [options of the bench]

Two results are compared only if they are of one machine and the same options, and nobody disturbed either; `force=true`
shows the ratios all the same. A pair of rounds beside which others used the machine does not count. Every round's
result is kept in runs/bench/compare, also if the comparison is interrupted or a round fails.

Each figure that both have gets the ratio B / A with a 95 % interval from the rounds, and a verdict. "same" means that
the interval holds 1. One interval in twenty leaves 1 out by chance, so a verdict has to hold for the table as a whole
(Holm, 1979); "unsure" is a figure whose own interval leaves 1 out and that does not pass this. The column `shows` is
the smallest change that so many rounds would have shown.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from bench import ROOT
from bench.catalogue import CATALOGUE
from bench.drawing.difference_plot import draw
from bench.measuring.comparable import obstacles
from bench.measuring.differences import LEAST_ROUNDS, Difference, compared, show
from bench.measuring.disturbance import ROUNDS, reason
from bench.measuring.result import Result
from bench.measuring.terminal import say, written
from engine.console.options import Positional, Rest, parse
from sandbox.require import at_least, one_of, require

KEPT = Path("runs/bench/compare")
PLOT = Path("runs/bench/compare.png")


@dataclass(frozen=True, kw_only=True)
class Options:
    what: Annotated[tuple[str, ...], Positional("two results, or the name of a bench")]
    other: Annotated[Path | None, "another checkout that has the bench"] = None
    rounds: Annotated[int, "of each checkout"] = 7
    metric: Annotated[str, "compare this figure only, CASE/METRIC"] = ""
    force: Annotated[bool, "compare also what must not be compared"] = False
    fields: Annotated[tuple[str, ...], Rest("options of the bench")] = ()

    def __post_init__(self) -> None:
        if len(self.what) != (2 if self.other is None else 1):
            raise ValueError(f"what must be two results, or a bench with other=DIR, got {' '.join(self.what)!r}")
        if self.other is not None:
            require("what", self.what[0], one_of(*CATALOGUE))
        require("rounds", self.rounds, at_least(LEAST_ROUNDS))


def main(argv: Sequence[str]) -> int:
    options = parse(Options, argv, program="rocstar bench compare", description=__doc__)
    if options.other is None:
        path_a, path_b = map(Path, options.what)
        _files(path_a, path_b, options)
        return 0
    return _checkouts(options.what[0], options.other, options)


def _files(path_a: Path, path_b: Path, options: Options) -> None:
    a, b = Result.read(path_a), Result.read(path_b)
    reasons = obstacles(a, b)
    for name, result in (("A", a), ("B", b)):
        around = f"others used {100 * result.environment.others:.0f} %"
        say(f"{name}: {result.machine}, {around}, {result.date}, commit {result.commit}")
    if reasons and not options.force:
        raise ValueError(f"A and B must not be compared: {'; '.join(reasons)}. Fix: measure both anew, or force=true")
    for each in reasons:
        say(f"compared all the same: {each}")
    tell(compared(a.flat(), b.flat(), paired=False, metric=options.metric), f"{a.bench}: {path_b} against {path_a}")
    say(
        "The rounds of A and B were not run in turns: what the machine did at the time of each is part of the ratio. "
        f"To compare code: rocstar bench compare {a.bench} other=DIR"
    )


def _checkouts(name: str, other: Path, options: Options) -> int:
    """Runs a round of each checkout at a time, the one that begins by turns; a failure or Ctrl-C compares those that
    are finished.
    """
    samples: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
    places = (ROOT, other)
    code = counted = lost = 0
    try:
        for number in range(options.rounds):
            pair = {}
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                say(f"round {number + 1} of {options.rounds}, {'AB'[which]}: {places[which]}")
                kept = KEPT / name / f"{number + 1}{'AB'[which]}.json"
                pair[which] = measured(name, places[which], fields_of(name, number, options.fields), kept.absolute())
            rounds = pair[0].flat(), pair[1].flat()
            _promising(*rounds, options.metric)
            if (why := _disturbed(pair.values())) and not options.force:
                say(f"round {number + 1} does not count: {why}")
                lost += 1
                if options.rounds - lost < LEAST_ROUNDS:
                    break
                continue
            counted += 1
            for which in (0, 1):
                for figure, values in rounds[which].items():
                    samples[which].setdefault(figure, []).extend(values)
    except KeyboardInterrupt:
        code = 130
        say("interrupted: the finished rounds follow")
    except subprocess.CalledProcessError as error:
        code = 1
        say(f"error: a run ended with exit code {error.returncode}; see above. The finished rounds follow")
    say(f"the rounds are kept in {KEPT / name}")
    if counted < LEAST_ROUNDS:
        say(f"error: {counted} of the rounds count, {LEAST_ROUNDS} must. Fix: run it alone, or force=true")
        return code or 2
    tell(compared(*samples, paired=True, metric=options.metric), f"{name}: {other} (B) against this checkout (A)")
    return code


def tell(differences: Sequence[Difference], title: str) -> None:
    show(differences)
    print(f"plot: {written(PLOT, partial(draw, differences=differences, title=title))}")


def fields_of(name: str, number: int, fields: Sequence[str]) -> list[str]:
    """Returns the options of a round: one round, and a seed of its own where the bench has seeds.

    Otherwise a difference that one seed shows would look like one of the code, in every round.
    """
    options = CATALOGUE[name].load().BENCH.options
    own: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(options)}
    given = {field.partition("=")[0] for field in fields}
    return [
        *(["rounds=1"] if "rounds" in own else []),
        *([f"seed={own['seed'] + number}"] if "seed" in own and "seed" not in given else []),
        *fields,
    ]


def measured(name: str, checkout: Path, fields: Sequence[str], kept: Path) -> Result:
    """Runs the bench of a checkout and keeps its result. Raises CalledProcessError."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "bench", name, *fields, f"json={kept}"]
    subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.DEVNULL)
    return Result.read(kept)


def _promising(a: Mapping[str, object], b: Mapping[str, object], metric: str) -> None:
    """Raises ValueError after the first pair where no further one can make a comparison of it."""
    common = a.keys() & b.keys()
    if not common or (metric and metric not in common):
        raise ValueError(
            f"both checkouts must have the figure {metric or 'of a round'}. Fix: {', '.join(common) or '-'}"
        )


def _disturbed(pair: Collection[Result]) -> str | None:
    if any(each.simulated for each in pair):
        return None
    return next((why for each in pair if (why := reason(each.environment.others, ROUNDS))), None)
