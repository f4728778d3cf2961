"""A bench with every combination of some options: a table, and a plot of two of its figures.

python -m bench sweep rollout --over trajectories=256,1024 --over rounds=3 [--plot METRIC,METRIC] [options]
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from bench.measuring.report import drawn, say, table

Point = tuple[dict[str, str], Mapping[str, Any]]  # options, metrics


def combinations(over: Sequence[str]) -> list[dict[str, str]]:
    """Raises ValueError for what is not NAME=VALUE,VALUE.

    >>> combinations(["a=1,2", "b=x"])
    [{'a': '1', 'b': 'x'}, {'a': '2', 'b': 'x'}]
    """
    names, values = [], []
    for each in over:
        name, equals, given = each.partition("=")
        if not name or not equals or not given:
            raise ValueError(f"--over must be NAME=VALUE,VALUE, got {each!r}")
        names.append(name)
        values.append(given.split(","))
    return [dict(zip(names, chosen, strict=True)) for chosen in product(*values)]


def measured(name: str, chosen: Mapping[str, str], further: Sequence[str]) -> Mapping[str, Any]:
    """The metrics of one run, in a process of its own. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        words = [word for option, value in chosen.items() for word in (f"--{option}", value)]
        command = [sys.executable, "-m", "bench", name, *words, *further, "--json", str(path)]
        say(shlex.join(command[1:-2]))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: Mapping[str, Any] = json.loads(path.read_text())["metrics"]
        return found


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points no other one is better than in both, larger being better; by their first number.

    >>> pareto([(1, 5), (2, 4), (2, 3), (3, 1)])
    [0, 1, 3]
    """
    order = sorted(range(len(points)), key=lambda index: (-points[index][0], -points[index][1]))
    found, best = [], float("-inf")
    for index in order:
        if points[index][1] > best:
            found.append(index)
            best = points[index][1]
    return sorted(found, key=lambda index: points[index][0])


def plot(path: Path, points: Sequence[Point], x: str, y: str) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    places = [(float(metrics[x]), float(metrics[y])) for _, metrics in points]
    best = pareto(places)
    axes.plot([places[index][0] for index in best], [places[index][1] for index in best], color="0.7", zorder=1)
    for (chosen, _), (across, up) in zip(points, places, strict=True):
        axes.scatter([across], [up], zorder=2)
        axes.annotate(" ".join(f"{name}={value}" for name, value in chosen.items()), (across, up), fontsize=7)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench sweep", description=__doc__.splitlines()[0])
    parser.add_argument("bench")
    parser.add_argument("--over", action="append", required=True, metavar="NAME=VALUE,VALUE")
    parser.add_argument("--plot", metavar="METRIC,METRIC", help="larger is better in both: the line is what can be had")
    options, further = parser.parse_known_args(argv)
    try:
        points: list[Point] = [
            (chosen, measured(options.bench, chosen, further)) for chosen in combinations(options.over)
        ]
        shown = [name for name, value in points[0][1].items() if isinstance(value, int | float)]
        axes = options.plot.split(",") if options.plot else []
        if unknown := [name for name in axes if name not in shown]:
            raise ValueError(f"--plot: there is no {unknown[0]} (there is: {', '.join(shown)})")
        if len(axes) not in (0, 2):
            raise ValueError(f"--plot must be two metrics, got {options.plot!r}")
    except (ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    header = [*points[0][0], *shown]
    rows = [
        [*chosen.values(), *(f"{metrics.get(name, float('nan')):.4g}" for name in shown)] for chosen, metrics in points
    ]
    table(f"{options.bench} over {' and '.join(points[0][0])}", header, rows)
    if axes:
        print(drawn(Path("runs/bench/sweep.png"), lambda path: plot(path, points, *axes)))
    return 0
