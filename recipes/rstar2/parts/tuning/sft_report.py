"""Shows how supervised fine-tuning goes: a bar, a curve, and the card of the model."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine import metric_names as metric


class LossCurve:
    """Collects the metrics of a run. losses and held_out: (step, loss)."""

    def __init__(self, rows: Sequence[Mapping[str, float]] = ()) -> None:
        self.rows: list[dict[str, float]] = []
        for row in rows:
            self.step(int(row["step"]), row)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append({**metrics, "step": step})

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(int(row["step"]), row[name]) for row in self.rows if name in row]

    @property
    def losses(self) -> list[tuple[int, float]]:
        return self.of("loss")

    @property
    def train_s(self) -> float:
        return max((seconds for _, seconds in self.of(metric.TIME_TRAIN_TOTAL_S)), default=0.0)

    def summary(self) -> dict[str, Any]:
        """Returns the figures before and after training; they are None where nothing was measured."""
        tokens = sum(value for _, value in self.of("tokens"))
        return {
            "steps": len(self.losses),
            "loss_first": self.losses[0][1] if self.losses else None,
            "loss_last": self.losses[-1][1] if self.losses else None,
            "held_out_loss": self._change("held_out/loss"),
            "tool_calls": self._change("format/calls"),
            "malformed": self._change("format/malformed"),
            "tokens": int(tokens),
            "tokens_learnt": int(sum(value for _, value in self.of("tokens_learnt"))),
            "train_s": self.train_s,
            "tokens_per_s": tokens / self.train_s if self.train_s else None,
            "peak_bytes": max((value for _, value in self.of(metric.LEARNER_PEAK_BYTES)), default=None),
        }

    def _change(self, name: str) -> dict[str, float | None]:
        values = self.of(name)
        before = values[0][1] if values and values[0][0] == 0 else None
        after = values[-1][1] if values and values[-1][0] > 0 else None
        return {"before": before, "after": after}


def plot(path: Path, curve: LossCurve) -> None:
    """Draws loss, held-out loss and learning rate over the steps, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    steps, losses = zip(*curve.losses, strict=True)
    axes.plot(steps, losses, color="#08519c", alpha=0.5, marker="o" if len(steps) == 1 else "", label="batch")
    if held_out := curve.of("held_out/loss"):
        axes.plot(*zip(*held_out, strict=True), color="#cb181d", marker="o", ms=4, label="held-out", clip_on=False)
    axes.set(xlabel="step", ylabel="loss per learnt token", xlim=(0, max(steps)))
    axes.grid(alpha=0.25)
    rate = axes.twinx()
    rate.plot(*zip(*curve.of(metric.LEARNER_LR), strict=True), color="grey", ls=":", label="learning rate")
    rate.set(ylabel="learning rate", ylim=(0, None))
    axes.set_title(f"Supervised fine-tuning: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)


class Meter:
    """Shows a progress bar on a terminal, elsewhere a line for each step, or none. `with Meter(...) as meter`."""

    def __init__(
        self, console: Console, title: str, total: int, *, unit: str, begin: int = 0, lines: bool = True
    ) -> None:
        self._console, self._lines = console, lines
        self._bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
            times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
            self._bar = Progress(*columns, *times, console=console)
            self._task = self._bar.add_task(title, total=total, completed=begin, note="")
        elif not lines:
            console.print(f"{title}: {total} {unit}", style="dim", highlight=False)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        note = _note(metrics or {})
        if self._bar:
            self._bar.update(self._task, completed=done, note=note)
        elif self._lines:
            self._console.print(f"step {done:4d}  {note}", highlight=False, soft_wrap=True)


def _note(metrics: Mapping[str, float]) -> str:
    parts = []
    if "loss" in metrics:
        parts.append(f"loss {metrics['loss']:.4f}")
    if "held_out/loss" in metrics:
        parts.append(f"held-out {metrics['held_out/loss']:.4f}")
    if metric.LEARNER_TOKENS_PER_S in metrics:
        parts.append(f"{metrics[metric.LEARNER_TOKENS_PER_S]:,.0f} tokens/s")
    return "  ".join(parts)


# Figures of a summary, with their titles.
CHANGES = {
    "held_out_loss": "held-out loss per learnt token",
    "tool_calls": "held-out replies with a tool call",
    "malformed": "held-out replies with a malformed call",
}


def changes(summary: Mapping[str, Any]) -> list[str]:
    """Returns what training changed, a line for each figure that was measured."""
    changed = [(title, summary[name]) for name, title in CHANGES.items() if summary[name]["after"] is not None]
    return [
        f"{title}: {_figure(change['before'])} before, {_figure(change['after'])} after" for title, change in changed
    ]


def model_card(model: Path, command: Sequence[str], summary: Mapping[str, Any]) -> str:
    """Returns README.md of the trained model: what it is, how it was made, and what was measured."""
    packages = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    trained = f"Trained from `{model}` on {summary['conversations']} conversations in {summary['steps']} steps"
    lines = ["# A model taught to call tools", "", f"{trained} with rocstar:", "", f"    {shlex.join(command)}", ""]
    lines += [f"- {line}" for line in changes(summary)]
    return "\n".join([*lines, "", f"Versions: {packages}.", ""])


def _figure(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"
