"""Runs a bench with each value of an option, or each pair of values of two: a table, and a plot.

rocstar bench sweep rollout over=trajectories:256,1024 [by=concurrent:64,256] [metric=M] [options of the bench]
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from bench.measuring.result import Result, name_of
from bench.measuring.terminal import say, table, written
from engine.console.options import Positional, Rest, parse

PLOT = Path("runs/bench/sweep.png")
Chosen = dict[str, str]  # option -> value


@dataclass(frozen=True, kw_only=True)
class Options:
    bench: Annotated[str, Positional("name of the bench")]
    over: Annotated[str, "an option and its values, FIELD:VALUE,VALUE"]
    by: Annotated[str, "a second one"] = ""
    metric: Annotated[str, "show this figure only, CASE/METRIC"] = ""
    fields: Annotated[tuple[str, ...], Rest("options of the bench")] = ()


def main(argv: Sequence[str]) -> int:
    options = parse(Options, argv, program="rocstar bench sweep", description=__doc__)
    points: list[tuple[Chosen, Result]] = []
    try:
        for chosen in combinations(options.over, options.by):
            points.append((chosen, measured(options.bench, chosen, options.fields)))
    except subprocess.CalledProcessError as error:
        say(f"error: the bench ended with exit code {error.returncode}; see above")
        return 1
    except KeyboardInterrupt:
        say("interrupted: the finished points follow")
    if not points:
        return 130
    rows = rows_of(points, options.metric)
    table(options.bench, ["", *(_label(chosen) for chosen, _ in points)], rows)
    print(f"plot: {written(PLOT, partial(plot, points=points, metric=options.metric))}")
    return 0


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


def measured(name: str, chosen: Chosen, fields: Sequence[str]) -> Result:
    """Runs the bench in a process of its own. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        options = [*(f"{field}={value}" for field, value in chosen.items()), *fields]
        say(shlex.join(["rocstar", "bench", name, *options]))
        command = [sys.executable, "-m", "bench", name, *options, f"json={path}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return Result.read(path)


def rows_of(points: Sequence[tuple[Chosen, Result]], metric: str) -> list[list[str]]:
    """Returns a row for each figure, a column for each point. Raises ValueError for a metric that there is not."""
    names = list(dict.fromkeys(name for _, result in points for name in result.flat()))
    if metric and metric not in names:
        raise ValueError(f"metric must be one of {', '.join(names)}, got {metric!r}")
    return [[name, *(_cell(result, name) for _, result in points)] for name in names if metric in ("", name)]


def plot(path: Path, *, points: Sequence[tuple[Chosen, Result]], metric: str) -> None:
    """Draws a figure over the points, by default the first one, with a dot for each round."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    name = metric or next(iter(points[0][1].flat()))
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    samples = [result.flat().get(name, []) for _, result in points]
    for place, values in enumerate(samples):
        axes.plot([place] * len(values), values, "k.")
    axes.set_xticks(range(len(points)), [_label(chosen) for chosen, _ in points], fontsize=7)
    axes.set_ylabel(name)
    figure.savefig(path, dpi=150)


def _cell(result: Result, name: str) -> str:
    for case, figures in result.figures.items():
        for metric, value in figures.items():
            if name_of(case, metric) == name:
                return result.metrics[metric].shown(value)
    return ""


def _label(chosen: Chosen) -> str:
    return " ".join(f"{field}={value}" for field, value in chosen.items())
