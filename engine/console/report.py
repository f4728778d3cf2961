"""The report of a run at its end: a plot, a table before/after, and three problems before and after."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from engine import metric_names as metric
from engine.console.shown import shown
from engine.diagnosis.limit import Diagnosis
from engine.diagnosis.step_window import Limit
from engine.rollout.chat_template import ChatConfig
from engine.telemetry import metrics as measure
from engine.types import Trajectory
from sandbox.printable import printable

_BLUE, _RED = "#08519c", "#cb181d"


class Progress:
    """What a run has measured so far: its steps, its evaluations, and their totals."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []  # each row has "step" and the training seconds before it
        self.before: list[Trajectory] | None = None  # before training; a killed run may lose them
        self.after: list[Trajectory] = []  # the last evaluation's

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a step, of an evaluation of its weights, or of both. Step 0 is before training."""
        row = {"step": step, metric.TIME_TRAIN_TOTAL_S: 0.0, **metrics}
        if measure.is_step(row):
            self.steps.append(row)
        if metric.EVAL_ACCURACY in row:
            self.evaluations.append(row)

    @property
    def train_s(self) -> float:
        return self.steps[-1][metric.TIME_TRAIN_TOTAL_S] if self.steps else 0.0

    def has_evaluated(self, step: int) -> bool:
        return any(row["step"] == step for row in self.evaluations)

    def missed(self, every: int) -> int:
        """Returns how many due evaluations are missing: dropped for a newer one, or lost with a killed run."""
        due = {*range(0, len(self.steps), every), len(self.steps)}
        return len(due - {row["step"] for row in self.evaluations})

    def evaluated(self, step: int, trajectories: list[Trajectory]) -> None:
        """Keeps the trajectories of an evaluation as examples; empty if they were lost with a killed run."""
        self.before = self.before if step else trajectories
        self.after = trajectories

    def seconds_of(self, step: int) -> float:
        """Returns the seconds of training until a step was live."""
        return self.steps[step - 1][metric.TIME_TRAIN_TOTAL_S] if step else 0.0

    def total(self, name: str) -> float:
        """Returns a metric's sum over the steps."""
        return sum(row.get(name, 0) for row in self.steps)

    def summary(self) -> dict[str, Any]:
        """Returns figures of the whole run, without those of evaluations if there was none."""
        waste = {name: metric.part_of(metric.WASTE, name) for row in self.steps for name in row}
        return {
            **(self._scores() if self.evaluations else {}),
            "steps": len(self.steps),
            "rl_wall_s": self.train_s,
            "tool_calls": self._calls(metric.TOOLS_CALLS, metric.EVAL_TOOL_CALLS),
            "tool_calls_jailed": self._calls(metric.TOOLS_CALLS_JAILED, metric.EVAL_TOOL_CALLS_JAILED),
            "tokens_generated": int(self.total(metric.TOKENS_GENERATED)),
            "tokens_trained": int(self.total(metric.TOKENS_TRAINED)),
            "goodput": self.total(metric.TOKENS_TRAINED) / max(1, self.total(metric.TOKENS_GENERATED)),
            "wasted_tokens": {f"{waste[name]}_tokens": self.total(name) for name in sorted(waste) if waste[name]},
            "staleness_max": int(max((row.get(metric.ROLLOUT_STALENESS_MAX, 0) for row in self.steps), default=0)),
            "mean_seconds_per_step": {
                "step": self._mean(metric.TIME_STEP_S),
                "rollout": self._mean(metric.TIME_ROLLOUT_S),
                "learn": self._mean(metric.TIME_LEARN_S),
                "sync": self._mean(metric.TIME_SYNC_S),
            },
        }

    def _calls(self, rolled: str, evaluated: str) -> int:
        return int(self.total(rolled) + sum(score[evaluated] for score in self.evaluations))

    def _scores(self) -> dict[str, Any]:
        first, last = self.evaluations[0], self.evaluations[-1]
        before = first if not first["step"] else {}
        return {
            "accuracy_initial": before.get(metric.EVAL_ACCURACY),
            "accuracy_final": last[metric.EVAL_ACCURACY],
            "accuracy_final_interval": [last[metric.EVAL_ACCURACY_LOW], last[metric.EVAL_ACCURACY_HIGH]],
            "accuracy_n": int(last[metric.EVAL_N]),
            "tool_error_share_initial": before.get(metric.EVAL_TOOL_ERROR_SHARE_CORRECT),
            "tool_error_share_final": last[metric.EVAL_TOOL_ERROR_SHARE_CORRECT],
        }

    def _mean(self, name: str) -> float | None:
        """Returns the mean over the steps that have it: one that was begun before the run was resumed has no times."""
        values = [row[name] for row in self.steps if name in row]
        return sum(values) / len(values) if values else None

    def seconds_to(self, accuracy: float) -> float | None:
        """Returns the training seconds to this held-out accuracy, linear between evaluations; None if never reached."""
        points = [(row[metric.TIME_TRAIN_TOTAL_S], row[metric.EVAL_ACCURACY]) for row in self.evaluations]
        if points and points[0][1] >= accuracy:
            return points[0][0]
        for (t0, a0), (t1, a1) in pairwise(points):
            if a1 >= accuracy > a0:
                return t0 + (t1 - t0) * (accuracy - a0) / (a1 - a0)
        return None


def plot(path: Path, progress: Progress, title: str) -> None:
    """Plots reward, held-out accuracy and tool-error share over the steps, as a PNG. title: what was trained."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    history, scores = progress.steps, progress.evaluations
    steps = [row["step"] for row in history]
    at = [row["step"] for row in scores]
    names = (metric.EVAL_ACCURACY, metric.EVAL_ACCURACY_LOW, metric.EVAL_ACCURACY_HIGH)
    accuracy, low, high = ([score[name] for score in scores] for name in names)
    spread = [[a - b for a, b in zip(accuracy, low, strict=True)], [b - a for a, b in zip(accuracy, high, strict=True)]]
    errors = [score[metric.EVAL_TOOL_ERROR_SHARE_CORRECT] for score in scores]
    axes.errorbar(
        at, accuracy, spread, color=_BLUE, marker="o", ms=4, capsize=3, label="held-out accuracy (95 %)", clip_on=False
    )
    rewards = [row.get(metric.REWARD, math.nan) for row in history]  # a gap where nothing was graded
    known = [reward for reward in rewards if not math.isnan(reward)]
    light: dict[str, Any] = {"alpha": 0.35, "marker": "o" if len(steps) == 1 else ""}  # one point makes no line
    axes.plot(steps, rewards, color=_BLUE, label="reward of the rollouts", **light)
    axes.plot(
        at, errors, color=_RED, marker="s", ms=4, label="tool errors in correct trajectories, held-out", clip_on=False
    )
    rolled = [row.get(metric.TOOLS_ERROR_SHARE_CORRECT, math.nan) for row in history]
    axes.plot(steps, rolled, color=_RED, label="same, in the rollouts", **light)
    axes.set(xlabel="step", ylim=(min([0, *known]), max([1.02, *known])), xlim=(0, max(steps)))
    seconds = [0.0, *(row[metric.TIME_TRAIN_TOTAL_S] for row in history)]
    clock = axes.secondary_xaxis("top", functions=(_map([0, *steps], seconds), _map(seconds, [0, *steps])))
    clock.set_xlabel("seconds of training")
    axes.grid(alpha=0.25)
    axes.spines["right"].set_visible(False)
    n = int(scores[-1][metric.EVAL_N])
    since = "" if at[0] else f"{accuracy[0]:.2f} to "
    axes.set_title(f"{title}: held-out accuracy {since}{accuracy[-1]:.2f} (n = {n})")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=130)


def _map(xs: Sequence[float], ys: Sequence[float]) -> Callable[[Any], Any]:
    """Returns a function that is linear between the points and beyond them, as an axis needs it."""
    slope = (ys[-1] - ys[0]) / (xs[-1] - xs[0])

    def at(x: Any) -> Any:
        x = np.asarray(x, float)
        inside = np.interp(x, xs, ys)
        return np.where(
            x > xs[-1], ys[-1] + (x - xs[-1]) * slope, np.where(x < xs[0], ys[0] + (x - xs[0]) * slope, inside)
        )

    return at


def print_report(
    console: Console, folder: Path, summary: Mapping[str, Any], progress: Progress, diagnosis: Diagnosis | None = None
) -> None:
    """Prints the report. diagnosis: what limited the newest steps; None: it is left out."""
    before, after = progress.before or [], progress.after
    if after and list(map(_problem, before)) != list(map(_problem, after)):
        before = []
    if progress.evaluations and not before:
        console.print("no examples from before training: they were lost, dropped, or of another evaluation")
    if after:
        console.print(_samples(before, after))
        console.print(_table(before, after))
    elif progress.evaluations:
        console.print("no examples of the last evaluation: they were lost; its figures are in summary.json")
    first = summary["first_step_s"]
    console.print(
        f"{summary['steps']} steps in {summary['rl_wall_s']:.1f} s of training"
        + (f"; first step after {first:.1f} s{_parts(summary)}" if first is not None else "")
        + f"; {summary['tool_calls_jailed']:,} of {summary['tool_calls']:,} tool calls jailed; "
        f"goodput {summary['goodput']:.2f}",
        highlight=False,
        soft_wrap=True,
    )
    if diagnosis is not None:
        _print_diagnosis(console, diagnosis)
    for name, what in (
        ("reward.png", "reward, accuracy and tool errors over the steps"),
        ("timeline.json", "replicas, trajectories, tool calls, learner: open it at ui.perfetto.dev"),
        ("summary.json", "all figures; metrics.jsonl and tensorboard/ have them per step"),
        ("record", "rocstar view shows the run as a page, rocstar rollouts what the model wrote"),
        ("checkpoint", "the trained model, as a Hugging Face folder"),
    ):
        if (folder / name).exists():
            path = shown(str(folder / name))
            console.print(f"  {path}  [dim]{shown(what)}[/]", highlight=False, soft_wrap=True)


def _problem(trajectory: Trajectory) -> tuple[str, int]:
    return trajectory.prompt.id, trajectory.sample


def _print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Prints the sentence, the alarms, and the first piece of advice if something limits the run."""
    console.print(printable(diagnosis.sentence), markup=False, highlight=False, soft_wrap=True)
    for finding in diagnosis.alarms:
        console.print(f"  [red]alarm[/]  {shown(str(finding))}", highlight=False, soft_wrap=True)
    if diagnosis.limit is not Limit.NONE:
        for finding in diagnosis.advice[:1]:
            console.print(f"  advice  {shown(str(finding))}", highlight=False, soft_wrap=True)


def _parts(summary: Mapping[str, Any]) -> str:
    """Returns where the time until the first step went."""
    parts = summary.get("first_step_parts_s", {})
    return f" ({', '.join(f'{name} {seconds:.1f}' for name, seconds in parts.items())})" if parts else ""


def _table(before: Sequence[Trajectory], after: Sequence[Trajectory]) -> Table:
    table = Table("held-out", *(["before"] if before else []), "after", title="Before and after")
    scores = [(measure.evaluation(trajectories), len(trajectories)) for trajectories in (before, after) if trajectories]
    rows = (
        ("accuracy (pass@1)", metric.EVAL_ACCURACY),
        ("trajectories that use the tool", metric.EVAL_TOOL_RATE),
        ("tool errors in correct trajectories", metric.EVAL_TOOL_ERROR_SHARE_CORRECT),
    )
    for label, name in rows:
        table.add_row(label, *(f"{score[name]:.3f}" for score, _ in scores))
    table.add_row(
        "sampled tokens per trajectory", *(f"{score[metric.EVAL_TOKENS] / count:.1f}" for score, count in scores)
    )
    return table


def _samples(before: Sequence[Trajectory], after: Sequence[Trajectory]) -> Table:
    """Returns three held-out problems with a sample of each, if possible wrong at first and right at the end."""
    pairs: list[tuple[Trajectory, ...]] = (
        list(zip(before, after, strict=True)) if before else [(member,) for member in after]
    )
    learnt = [pair for pair in pairs if not measure.correct(pair[:1]) and measure.correct(pair[-1:])]
    chosen: dict[str, tuple[Trajectory, ...]] = {}
    for pair in learnt + pairs:
        chosen.setdefault(pair[0].prompt.id, pair)
    table = Table(title="Three held-out problems", show_lines=True)
    for name in ("problem", *(["before"] if before else []), "after"):
        table.add_column(name, overflow="fold")
    for pair in list(chosen.values())[:3]:
        prompt = pair[0].prompt
        question = shown(prompt.messages[-1]["content"]) + f"\n[dim]answer: {shown(prompt.answer)}[/]"
        table.add_row(question, *map(_transcript, pair))
    return table


def _transcript(trajectory: Trajectory) -> str:
    """Returns what the agent wrote, and what its tools answered between the turns."""
    lines = []
    for text, turn in zip(trajectory.turn_texts, trajectory.turns, strict=False):
        lines.append(shown(text.strip()))
        lines += [f"[dim]{shown(use.name or 'tool')} answered:[/] {shown(use.response)}" for use in turn.tool_uses]
    return "\n".join([*lines, "[green]right[/]" if measure.correct([trajectory]) else "[red]wrong[/]"])


def model_card(title: str, checkpoint: Path, command: str, chat: ChatConfig, summary: Mapping[str, Any]) -> str:
    """Returns README.md of a trained checkpoint: how it was made, how good it is, and how to ask it as in training."""
    lines = [f"# {title or 'A model trained by reinforcement learning'}", ""]
    lines += [f"Trained from `{checkpoint}` for {summary['steps']} steps with rocstar:", "", f"    {command}", ""]
    if "accuracy_final" in summary:
        low, high = summary["accuracy_final_interval"]
        before = summary["accuracy_initial"]
        since = "" if before is None else f", {before:.3f} before training"
        lines.append(
            f"Held-out accuracy: {summary['accuracy_final']:.3f} [{low:.3f}, {high:.3f}] over "
            f"{summary['accuracy_n']} problems{since}. It was measured on the weights under training; the files hold "
            "them in the dtype of config.json."
        )
        lines.append("")
    lines += _serving_lines(chat)
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    return "\n".join([*lines, f"Versions: {versions}.", ""])


def _serving_lines(chat: ChatConfig) -> list[str]:
    """Returns how to serve and ask the checkpoint; its folder has the chat template, but not what a request needs."""
    lines = ["The tokenizer has the chat template of the training. Tool calls are in the form of Hermes:", ""]
    lines += ["    vllm serve FOLDER --enable-auto-tool-choice --tool-call-parser hermes", ""]
    if chat.system is not None:
        lines += ["It was trained with this system message:", ""]
        lines += [f"    {line}" for line in chat.system.splitlines()] + [""]
    if chat.template_arguments:
        arguments = json.dumps(dict(chat.template_arguments), default=str)
        lines += [f"It was trained with these template arguments (`chat_template_kwargs`): `{arguments}`", ""]
    return lines
