"""Draws a result: a panel for each ratio, a bar for each case, a dot for each round."""

from __future__ import annotations

from pathlib import Path

from bench.measuring.metric import Kind
from bench.measuring.result import Result

MOST_PANELS = 6


def draw(result: Result, path: Path) -> None:
    """Writes a PNG of the ratios, or of the first metrics where there is none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    used = [name for name in result.metrics if any(name in of for of in result.figures.values())]
    ratios = [name for name in used if result.metrics[name].kind is Kind.RATIO]
    names = (ratios or used)[:MOST_PANELS]
    cases = {name: [case for case, of in result.figures.items() if name in of] for name in names}
    height = 1 + 0.3 * max(map(len, cases.values()))
    figure = Figure(figsize=(4.5 * len(names), height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for axis, name in zip(axes, names, strict=True):
        scale = result.metrics[name].scale
        for row, case in enumerate(cases[name]):
            samples = [scale * value for value in result.samples[case][name]]
            axis.barh(row, scale * result.figures[case][name], height=0.6, color="0.8")
            axis.plot(samples, [row] * len(samples), "k.", markersize=4)
        axis.set_yticks(range(len(cases[name])), cases[name], fontsize=8)
        axis.invert_yaxis()
        axis.set_title(f"{result.metrics[name].title}{result.metrics[name].unit}", fontsize=9)
    figure.savefig(path, dpi=110)
