"""Runs a bench or a recipe with each value of an option, or each pair of values of two: a table, and a plot.

    rocstar bench sweep rollout over=trajectories:256,1024 [by=concurrent:64,256] [metric=M] [options of the bench]
    rocstar bench sweep recipes/quickstart.py over=max_staleness:0,1,2 [steps=24] [rounds=3] [options of the recipe]

A recipe's figures are read from the files of its run: seconds of a step, tokens per second, accuracy, time until the
accuracy of `goal`. Each point is kept in runs/bench/sweep, by its options and the commit: a sweep that was interrupted,
or of which a point failed, goes on where it was when the same command is given again.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from bench import ROOT
from bench.catalogue import CATALOGUE
from bench.drawing import sweep_plot
from bench.drawing.sweep_plot import beside_others
from bench.measuring import recipe_run
from bench.measuring.disturbance import ROUNDS, Surroundings, reason
from bench.measuring.result import Case, Result, cell, gathered, name_of, summarised
from bench.measuring.run import commit, environment
from bench.measuring.terminal import say, table, written
from engine.console.options import Positional, Rest, parse
from sandbox.require import at_least, none_or, require

FOLDER = Path("runs/bench/sweep")
PLOT = Path("runs/bench/sweep.png")
Chosen = dict[str, str]  # option -> value
Points = list[tuple[Chosen, Result]]


@dataclass(frozen=True, kw_only=True)
class Options:
    target: Annotated[str, Positional("name of a bench, or the file of a recipe")]
    over: Annotated[str, "an option and its values, FIELD:VALUE,VALUE"]
    by: Annotated[str, "a second one"] = ""
    metric: Annotated[str, "show this figure only, METRIC or CASE/METRIC"] = ""
    rounds: Annotated[int | None, "of a bench; of a recipe: runs, each with a seed of its own, one by default"] = None
    goal: Annotated[float, "held-out accuracy until which a recipe's time is told"] = 0.9
    fresh: Annotated[bool, "measure also the points that are kept"] = False
    fields: Annotated[tuple[str, ...], Rest("options of the bench or recipe")] = ()

    def __post_init__(self) -> None:
        require("rounds", self.rounds, none_or(at_least(1)))
        if self.target not in CATALOGUE and not self.is_recipe:
            raise ValueError(
                f"there is no bench or recipe {self.target!r}. Fix: one of {', '.join(CATALOGUE)}, or FILE.py"
            )

    @property
    def is_recipe(self) -> bool:
        return self.target.endswith(".py") and Path(self.target).is_file()


def main(argv: Sequence[str]) -> int:
    options = parse(Options, argv, program="rocstar bench sweep", description=__doc__)
    chosen = combinations(options.over, options.by)
    points: Points = []
    code = 0
    for number, each in enumerate(chosen):
        try:
            say(f"point {number + 1} of {len(chosen)}: {_label(each)}")
            points.append((each, point(options, each)))
        except KeyboardInterrupt:
            code = 130
            say("interrupted: the finished points follow. The same command measures the others")
            break
        except subprocess.CalledProcessError as error:
            code = 1
            say(f"error: this point ended with exit code {error.returncode}; see above. The others go on")
    if not points:
        return code
    show(options, points)
    return code


def show(options: Options, points: Points) -> None:
    rows = rows_of(points, options.metric)
    table(
        options.target,
        ["", *(f"{_label(chosen)}{' *' if beside_others(result) else ''}" for chosen, result in points)],
        rows,
    )
    for name, metric in {name: metric for _, result in points for name, metric in result.metrics.items()}.items():
        if any(row[0].rpartition("/")[2] == name for row in rows):
            print(f"{name}: {'' if metric.title == name else f'{metric.title}, '}{metric.doc}")
    for chosen, result in points:
        if beside_others(result):
            print(
                f"* {_label(chosen)}: {result.disturbed}, so its times say little. Fix: run it alone, with fresh=true"
            )
    if not options.is_recipe and any(result.disturbed for _, result in points):
        print(f"-: no ratio is shown of a point that was disturbed or has fewer than {ROUNDS} rounds")
    over = options.over.partition(":")[0]
    draw = partial(sweep_plot.draw, points=points, over=over, metrics=panels(options, points))
    print(f"plot: {written(PLOT, draw)}")


def panels(options: Options, points: Points) -> list[tuple[Case | None, str]]:
    """Returns the figures to draw: the one that was chosen, or those that answer the bench's question."""
    there = {name for _, result in points for of in result.figures.values() for name in of}
    if options.metric in there:
        return [(None, options.metric)]
    if options.metric:
        case, _, name = options.metric.rpartition("/")
        return [(case, name)]
    headline = recipe_run.HEADLINE if options.is_recipe else CATALOGUE[options.target].load().BENCH.headline
    return [(None, name) for name in headline if name in there]


def combinations(over: str, by: str = "") -> list[Chosen]:
    """Returns the options of each point. Raises ValueError for an axis that is not FIELD:VALUE,VALUE.

    >>> combinations("a:1,2", "b:x")
    [{'a': '1', 'b': 'x'}, {'a': '2', 'b': 'x'}]
    """
    points: list[Chosen] = [{}]
    for axis in (over, by) if by else (over,):
        field, colon, values = axis.partition(":")
        if not field or not colon or not values:
            raise ValueError(f"an axis of a sweep must be FIELD:VALUE,VALUE, got {axis!r}")
        points = [point | {field: value} for point in points for value in values.split(",")]
    return points


def point(options: Options, chosen: Chosen) -> Result:
    """Returns a point as it is kept, or measures and keeps it. Raises CalledProcessError."""
    fields = [*(f"{field}={value}" for field, value in chosen.items()), *options.fields]
    stem = (FOLDER / key(options, fields)).absolute()
    kept = stem.with_suffix(".json")
    if kept.is_file() and not options.fresh:
        result = Result.read(kept)
        say(f"  kept on {result.date} in {kept}; fresh=true measures it anew")
        return result
    stem.parent.mkdir(parents=True, exist_ok=True)
    if options.is_recipe:
        result = of_recipe(options, fields, stem)
        result.write(kept)
        return result
    rounds = [] if options.rounds is None else [f"rounds={options.rounds}"]
    arguments = [options.target, *rounds, *fields]
    say(f"  {shlex.join(['rocstar', 'bench', *arguments])}")
    half = stem.with_suffix(".new")
    command = [sys.executable, "-m", "bench", *arguments, f"json={half}"]
    measured(command)
    half.replace(kept)
    return Result.read(kept)


def measured(command: Sequence[str]) -> None:
    """Runs a bench, whose progress is on stderr. Raises CalledProcessError."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def of_recipe(options: Options, fields: Sequence[str], stem: Path) -> Result:
    """Runs the recipe once for each round, the runs beside the point's file. Raises CalledProcessError, ValueError."""
    rounds, began = [], time.monotonic()
    load_before = environment(load_before=0.0, others=0.0).load_after
    with Surroundings() as surroundings:
        for number in range(options.rounds or 1):
            seed = [] if options.rounds is None else [f"seed={number}"]
            folder = stem.with_name(f"{stem.name}-{number}")
            say(f"  {shlex.join([options.target, *seed, *fields])}; the run: {folder}")
            rows = recipe_run.run_recipe(Path(options.target), folder, [*seed, *fields])
            rounds.append({"": recipe_run.figures(rows, options.goal)})
        others = surroundings.others()
    samples = gathered(rounds)
    return Result(
        bench=Path(options.target).stem,
        command=shlex.join([options.target, *fields]),
        date=time.strftime("%Y-%m-%d"),
        commit=commit(),
        environment=environment(load_before=load_before, others=others),
        config=dict(field.partition("=")[::2] for field in fields),
        rounds=len(rounds),
        disturbed=reason(others, len(rounds)),
        metrics={name: metric for name, metric in recipe_run.METRICS.items() if name in samples[""]},
        figures=summarised(samples, recipe_run.METRICS),
        samples=samples,
        wall_s=round(time.monotonic() - began, 1),
    )


def key(options: Options, fields: Sequence[str]) -> str:
    """Returns the name of a point's file: it changes with the options, the commit and what is not committed yet."""
    changes = subprocess.run(["git", "-C", str(ROOT), "diff", "HEAD"], capture_output=True, check=False).stdout
    source = Path(options.target).read_bytes() if options.is_recipe else b""
    text = json.dumps([options.target, options.rounds, options.goal, sorted(fields), commit()]).encode()
    return f"{Path(options.target).stem}-{hashlib.sha256(text + changes + source).hexdigest()[:12]}"


def rows_of(points: Points, metric: str) -> list[list[str]]:
    """Returns a row for each figure, a column for each point. Raises ValueError for a metric that there is not."""
    named = dict.fromkeys(
        (case, name)
        for _, result in points
        for name in result.metrics
        for case, of in result.figures.items()
        if name in of
    )
    rows = [
        [name_of(case, name), *(cell(result, case, name) if case in result.figures else "" for _, result in points)]
        for case, name in named
        if metric in ("", name, name_of(case, name))
    ]
    if not rows:
        names = dict.fromkeys(name for _, name in named)
        raise ValueError(f"metric must be one of {', '.join(names)}, or CASE/METRIC, got {metric!r}")
    return rows


def _label(chosen: Chosen) -> str:
    return " ".join(f"{field}={value}" for field, value in chosen.items())
