"""What the quick start shows at its end: a plot, a table before/after, and three problems before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from engine import measure
from engine.types import Trajectory

Evaluations = Sequence[tuple[int, float, list[Trajectory]]]


def plot(path: Path, history: Sequence[Mapping[str, float]], evaluations: Evaluations, algorithm: str) -> None:
    """Reward, held-out accuracy and tool-error share over the steps, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [row["step"] for row in history]
    scores = [measure.evaluation(trajectories) for _, _, trajectories in evaluations]
    at = [step for step, _, _ in evaluations]
    accuracy = [score["eval/accuracy"] for score in scores]
    below = [score["eval/accuracy"] - score["eval/accuracy_low"] for score in scores]
    above = [score["eval/accuracy_high"] - score["eval/accuracy"] for score in scores]
    axes.plot(steps, [row["reward"] for row in history], color="#9ecae1", lw=1.5, label="reward of the rollouts")
    axes.errorbar(at, accuracy, (below, above), color="#08519c", marker="o", ms=4, capsize=3, label="held-out accuracy")
    errors = [row["tool_error_share_correct"] for row in history]
    axes.plot(steps, errors, color="#fcae91", lw=1.5, label="tool errors in correct rollouts")
    held_out = [score["eval/tool_error_share_correct"] for score in scores]
    axes.plot(at, held_out, color="#cb181d", marker="s", ms=4, lw=1, label="same, held-out")
    axes.set_xlabel("step")
    axes.set_ylabel("share")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0, max(steps))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    n = int(scores[-1]["eval/n"])
    axes.set_title(f"{algorithm.upper() if algorithm == 'grpo' else 'GRPO-RoC'}: held-out {accuracy[0]:.2f} to {accuracy[-1]:.2f} (n = {n})")
    axes.legend(frameon=False, loc="center right")
    figure.savefig(path, dpi=130)


def print_report(console: Console, folder: Path, summary: Mapping[str, Any], evaluations: Evaluations) -> None:
    before, after = evaluations[0][2], evaluations[-1][2]
    console.print(_samples(before, after))
    console.print(_table(before, after))
    seconds = summary["seconds_to_090"]
    console.print(
        f"{summary['steps']} steps in {summary['rl_wall_s']:.1f} s of training"
        + (f", held-out 0.9 after {seconds:.1f} s" if seconds is not None else "")
        + f"; first step after {summary['first_step_s']:.1f} s; {summary['tool_calls_jailed']:,} of "
        f"{summary['tool_calls']:,} tool calls jailed; goodput {summary['goodput']:.2f}",
        highlight=False,
    )
    for name, what in (
        ("reward.png", "reward, accuracy and tool errors over the steps"),
        ("timeline.json", "replicas, trajectories, tool calls, learner: open it at ui.perfetto.dev"),
        ("summary.json", "all figures; metrics.jsonl and tensorboard/ have them per step"),
        ("checkpoint", "the trained agent; talk to it: python recipes/tiny_chat.py --checkpoint"),
    ):
        suffix = f" {folder / name}" if name == "checkpoint" else ""
        console.print(f"  {folder / name}  [dim]{what}{suffix}[/]", highlight=False, soft_wrap=True)


def _table(before: Sequence[Trajectory], after: Sequence[Trajectory]) -> Table:
    table = Table("held-out", "before", "after", title="Before and after")
    first, last = measure.evaluation(before), measure.evaluation(after)
    rows = (
        ("accuracy (pass@1)", "eval/accuracy"),
        ("trajectories that use the tool", "eval/tool_rate"),
        ("tool errors in correct trajectories", "eval/tool_error_share_correct"),
    )
    for label, name in rows:
        table.add_row(label, f"{first[name]:.3f}", f"{last[name]:.3f}")
    tokens = [score["eval/tokens"] / len(before) for score in (first, last)]
    table.add_row("sampled tokens per trajectory", *(f"{count:.1f}" for count in tokens))
    return table


def _samples(before: Sequence[Trajectory], after: Sequence[Trajectory]) -> Table:
    """Three held-out problems: wrong at first, right at the end, where there are such."""
    pairs = list(zip(before, after, strict=True))
    mended = [pair for pair in pairs if not pair[0].reward and pair[1].reward]
    table = Table("problem", "before", "after", title="Three held-out problems", show_lines=True)
    for old, new in (mended + pairs)[:3]:
        question = f"{old.prompt.messages[-1]['content']}\n[dim]answer: {old.prompt.answer}[/]"
        table.add_row(question, _transcript(old), _transcript(new))
    return table


def _transcript(trajectory: Trajectory) -> str:
    mark = "[green]right[/]" if trajectory.reward else "[red]wrong[/]"
    uses = [f"[dim]tool said:[/] {escape(use.response)}" for use in trajectory.tool_uses]
    text = escape(trajectory.text.replace("<|im_end|>", "\n").strip())
    return "\n".join([text, *uses, mark])
