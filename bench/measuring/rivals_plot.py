"""Draws what other placement policies would have made of a step, beside the error of the model that says so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(path: Path, *, ratios: Mapping[str, float], levers: Mapping[str, float], error: float | None) -> None:
    """Writes a PNG. ratios, levers: simulated makespan over that of the run's own policy, by policy and by change.
    error: of the logarithm of a ratio; None if it is not known.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows: Sequence[tuple[str, float, str]] = [
        *((name, ratio, "#0060c0") for name, ratio in ratios.items()),
        *((name, ratio, "#b05000") for name, ratio in levers.items()),
    ]
    figure = Figure(figsize=(7, 1.3 + 0.26 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if error is not None:
        low, high = math.exp(-error), math.exp(error)
        axes.axvspan(low, high, color="0.92", label=f"within the model's error of {100 * (high - 1):.0f} %")
        axes.legend(fontsize=7)
    axes.axvline(1.0, color="0.6", linewidth=1)
    for row, (_, ratio, colour) in enumerate(rows):
        axes.plot([ratio], [row], "o", color=colour, markersize=5)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("simulated makespan over that of the run's own policy", fontsize=8)
    figure.savefig(path, dpi=110)
