"""Draws a comparison: for each figure the ratio of B to A with its interval, beside a line at 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.measuring.differences import Difference

MOST_ROWS = 40
COLOURS = {"same": "0.5", "unsure": "#d08000"}  # a sure difference is blue, whichever way it goes
SURE = "#0060c0"


def draw(path: Path, *, differences: Sequence[Difference], title: str) -> None:
    """Writes a PNG of the differences, those that are least like 1 first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    shown = sorted(differences, key=lambda each: each.p)[:MOST_ROWS]
    figure = Figure(figsize=(7, 1.4 + 0.26 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.axvline(1.0, color="0.8", linewidth=1)
    for row, each in enumerate(shown):
        colour = COLOURS.get(each.verdict, SURE)
        axes.plot([each.low, each.high], [row, row], "-", color=colour)
        axes.plot([each.ratio], [row], "o", color=colour, markersize=4)
    axes.set_yticks(range(len(shown)), [f"{each.metric}: {each.verdict}" for each in shown], fontsize=8)
    axes.invert_yaxis()
    if max(each.high for each in shown) > 2 or min(each.low for each in shown) < 0.5:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g} x"))
    else:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * (value - 1):+.3g} %"))
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("B against A, with 95 % intervals", fontsize=9)
    axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=110)
