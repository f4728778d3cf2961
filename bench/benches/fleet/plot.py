"""Draws KV use over time: a panel per policy, a line per replica."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from bench.benches.fleet.replay import Record


class Run(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def policy(self) -> str: ...
    @property
    def record(self) -> Record: ...


def plot(runs: Sequence[Run], blocks: int, path: Path) -> None:
    """Writes a PNG of each policy's first run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    first = {run.policy: run for run in reversed(runs)}
    shown = sorted(first.values(), key=lambda run: run.record.makespan_s)
    end = max(run.record.makespan_s for run in shown)
    figure = Figure(figsize=(9, 1.5 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)
    for axis, run in zip(axes[:, 0], shown, strict=True):
        for replica in sorted({step.replica for step in run.record.steps}):
            steps = [step for step in run.record.steps if step.replica == replica]
            used = [1 - step.free_blocks / blocks for step in steps]
            axis.step([step.t for step in steps], used, where="post", linewidth=0.8, label=f"replica {replica}")
            lost = [step for step in steps if step.preempted]
            axis.plot([step.t for step in lost], [1.02] * len(lost), "rv", markersize=3)
        axis.axvline(run.record.makespan_s, color="0.6", linewidth=0.8)
        axis.set_ylim(0, 1.1)
        axis.set_xlim(0, end)
        axis.set_ylabel("KV in use")
        axis.set_title(
            f"{run.policy}: {run.record.makespan_s:.1f} s, {run.record.preemptions} preemptions (red), "
            f"{run.record.recomputed} tokens recomputed",
            fontsize=9,
            loc="left",
        )
    axes[0, 0].legend(loc="lower right", fontsize=7)
    axes[-1, 0].set_xlabel("seconds")
    figure.suptitle(f"{runs[0].kind}, seed {shown[0].seed}", fontsize=10)
    figure.savefig(path, dpi=110)
