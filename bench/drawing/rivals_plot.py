"""Draws what other placement policies would have made of a step, beside the error of the model that says so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(path: Path, *, ratios: Mapping[str, float], levers: Mapping[str, float], error: float | None) -> None:
    """Writes a PNG. ratios, levers: simulated makespan over that of the run as it was, by policy and by change. error:
    of the logarithm of a ratio, 95 %; None where it is not known.
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
        span = math.exp(-error), math.exp(error)
        axes.axvspan(*span, color="0.92", label="no difference: within the simulator's error")
        axes.legend(fontsize=7)
    axes.axvline(1.0, color="0.6", linewidth=1)
    for row, (_, ratio, colour) in enumerate(rows):
        axes.plot([ratio], [row], "o", color=colour, markersize=5)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=8)
    axes.invert_yaxis()
    known = "" if error is not None else "; the simulator's error is not known"
    axes.set_xlabel(f"simulated makespan over that of the run as it was{known}", fontsize=8)
    figure.savefig(path, dpi=110)
