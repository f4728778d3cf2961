"""Draws a sweep: a panel for each figure, its meaning and unit at the axis, a line for each case, a dot each round."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.measuring.disturbance import MOST
from bench.measuring.metric import Kind
from bench.measuring.result import Case, Result

MOST_PANELS, MOST_LINES = 6, 8
Chosen = Mapping[str, str]  # option -> value
Points = Sequence[tuple[Chosen, Result]]


def draw(path: Path, *, points: Points, over: str, metrics: Sequence[tuple[Case | None, str]]) -> None:
    """Writes a PNG. over: the option on the x axis. metrics: (case or None for all of them, metric), a panel each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = metrics[:MOST_PANELS]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, (case, name) in zip(axes, shown, strict=False):
        _panel(axis, points, over, case, name)
    for axis in axes[len(shown) :]:
        axis.set_visible(False)
    figure.savefig(path, dpi=110)


def _panel(axis: Any, points: Points, over: str, case: Case | None, name: str) -> None:
    metric = next(result.metrics[name] for _, result in points if name in result.metrics)
    places = list(dict.fromkeys(chosen[over] for chosen, _ in points))
    lines = lines_of(points, over, case, name)
    for label, samples in list(lines.items())[:MOST_LINES]:
        at = [places.index(value) for value, _, _ in samples]
        [line] = axis.plot(at, [metric.scale * summary for _, summary, _ in samples], "-", linewidth=1, label=label)
        for place, (_, _, values) in zip(at, samples, strict=True):
            axis.plot([place] * len(values), [metric.scale * value for value in values], ".", color=line.get_color())
    disturbed = {chosen[over] for chosen, result in points if beside_others(result)}
    axis.set_xticks(
        range(len(places)), [f"{place}{' *' if place in disturbed else ''}" for place in places], fontsize=8
    )
    axis.set_xlabel(f"{over}{'   (*: others used the machine)' if disturbed else ''}", fontsize=9)
    axis.set_ylabel(f"{metric.title}{f', {metric.unit.strip()}' if metric.unit else ''}", fontsize=9)
    left_out = f"; {len(lines) - MOST_LINES} cases are left out" if len(lines) > MOST_LINES else ""
    axis.set_title(textwrap.fill(f"{metric.title}: {metric.doc}{left_out}", 52), fontsize=7)
    if lines and metric.kind in (Kind.TIME, Kind.CPU, Kind.RATE):
        axis.set_ylim(bottom=0)  # or small differences would look large
    if not lines:
        axis.text(0.5, 0.5, "no ratio of a disturbed point is shown", transform=axis.transAxes, ha="center", fontsize=8)
    if len(lines) > 1:
        axis.legend(fontsize=6)


def beside_others(result: Result) -> bool:
    """Returns whether other processes used so much of the machine that the times of a point say little."""
    return not result.simulated and result.environment.others > MOST


def lines_of(
    points: Points, over: str, case: Case | None, name: str
) -> dict[str, list[tuple[str, float, Sequence[float]]]]:
    """Returns (value of the x axis, figure, its rounds) by line: a case, with the value of the second option.

    A ratio of a point that was disturbed is left out.
    """
    lines: dict[str, list[tuple[str, float, Sequence[float]]]] = {}
    for chosen, result in points:
        if name in result.metrics and result.metrics[name].kind is Kind.RATIO and result.disturbed:
            continue
        by = [f"{field}={value}" for field, value in chosen.items() if field != over]
        for each, of in result.figures.items():
            if name in of and case in (None, each):
                label = " ".join([*([each] if each else []), *by]) or name
                lines.setdefault(label, []).append((chosen[over], of[name], result.samples[each][name]))
    return lines
