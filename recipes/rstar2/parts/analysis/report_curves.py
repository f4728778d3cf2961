"""Draws the curves of a run beside those of rStar2-Agent's report, and its entropies, as PNGs.

What the report says (arXiv 2508.20722) stands here as constants. It is drawn where it is on the scale of the run, else
it stands below the plot as text: a tiny agent's hundred tokens would vanish beside eight thousand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from engine import metric_names as metric

BLUE, RED, GREEN, GREY = "#08519c", "#cb181d", "#238b45", "#737373"

# (step, value) at the ends of the three stages: 300, 85 and 125 steps.
RESPONSE_TOKENS = ((0, 1000.0), (300, 4000.0), (385, 6000.0), (510, 8000.0))
AIME24 = ((0, 0.033), (300, 0.721), (385, 0.770), (510, 0.806))
AIME25 = ((0, 0.0), (300, 0.642), (385, 0.648), (510, 0.698))
GRPO_TOOL_ERRORS = (0.10, 0.15)  # in correct trajectories, where plain GRPO stays; under GRPO-RoC they keep falling
TRUNCATED_PEAK = 0.10  # share of rollouts that ran out of tokens: above this in stage 1, and falling by itself

# A reference is drawn where it is within this factor of the run's values, and the run has this share of its steps.
NEAR_FACTOR, NEAR_STEPS = 4.0, 0.1

Rows = Sequence[Mapping[str, float]]
Points = Sequence[tuple[float, float]]


def on_scale(ours: Points, theirs: Points) -> bool:
    """Returns whether a curve of the report can be compared with the run's by eye.

    >>> on_scale([(0, 110.0), (40, 90.0)], RESPONSE_TOKENS)
    False
    >>> on_scale([(0, 900.0), (200, 2500.0)], RESPONSE_TOKENS)
    True
    """
    if not ours:
        return False
    steps_near = max(step for step, _ in ours) >= NEAR_STEPS * max(step for step, _ in theirs)
    values, references = [value for _, value in ours], [value for _, value in theirs]
    return steps_near and max(values) * NEAR_FACTOR >= min(references) and min(values) <= NEAR_FACTOR * max(references)


def series(rows: Rows, name: str, per: str = "") -> list[tuple[float, float]]:
    """Returns (step, value) of the rows that have the metric. per: a metric to divide by."""
    points = [(row["step"], row[name] / max(1, row[per]) if per else row[name]) for row in rows if name in row]
    return sorted(points)


def plot_curves(path: Path, rows: Rows) -> list[str]:
    """Draws tool errors, length, truncation and accuracy. Returns what of the report is not drawn, as sentences."""
    figure = Figure(figsize=(10, 6.6), layout="constrained")
    axes = figure.subplots(2, 2)
    notes = [
        _tool_errors(axes[0, 0], rows),
        _lengths(axes[0, 1], rows),
        _truncated(axes[1, 0], rows),
        _accuracy(axes[1, 1], rows),
    ]
    for each in axes.flat:
        each.set_xlabel("step")
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
        if each.get_legend_handles_labels()[0]:
            each.legend(frameon=False, fontsize=8)
    written = [note for note in notes if note]
    figure.supxlabel("\n".join(written), fontsize=7, color=GREY)
    figure.savefig(path, dpi=130)
    return written


def _line(axes: Axes, points: Points, label: str, colour: str, *, marker: str = "") -> None:
    if points:
        marker = "o" if len(points) == 1 else marker
        axes.plot(*zip(*points, strict=True), color=colour, label=label, marker=marker, ms=4, clip_on=False)


def _reference(axes: Axes, ours: Points, theirs: Points, label: str) -> bool:
    """Draws the report's curve up to the run's last step, if it is on the run's scale."""
    if not on_scale(ours, theirs):
        return False
    last = max(step for step, _ in ours)
    axes.plot(*zip(*theirs, strict=True), color=GREY, ls="--", marker="s", ms=3, label=label)
    axes.set_xlim(0, last * 1.02)
    return True


def _tool_errors(axes: Axes, rows: Rows) -> str:
    axes.set_title("tool errors in correct trajectories", fontsize=10)
    rolled = series(rows, metric.TOOLS_ERROR_SHARE_CORRECT)
    _line(axes, rolled, "rollouts", RED)
    _line(axes, series(rows, metric.EVAL_TOOL_ERROR_SHARE_CORRECT), "held-out", BLUE, marker="o")
    low, high = GRPO_TOOL_ERRORS
    if max((value for _, value in rolled), default=0.0) * NEAR_FACTOR < low:
        return f"Tool errors in correct trajectories: plain GRPO stays at {low:.0%} to {high:.0%} in the report."
    axes.axhspan(low, high, color=GREY, alpha=0.2, lw=0, label="report: plain GRPO stays here")
    axes.set_ylim(bottom=0)
    return ""


def _lengths(axes: Axes, rows: Rows) -> str:
    axes.set_title("sampled tokens per trajectory", fontsize=10)
    ours = series(rows, metric.ROLLOUT_RESPONSE_TOKENS)
    _line(axes, ours, "rollouts", BLUE)
    drawn = _reference(axes, ours, RESPONSE_TOKENS, "report (tool tokens included)")
    axes.set_ylim(bottom=0)
    stages = ", ".join(f"{value:,.0f} at step {step}" for step, value in RESPONSE_TOKENS)
    return "" if drawn else f"Response length (tool tokens included) in the report: {stages}."


def _truncated(axes: Axes, rows: Rows) -> str:
    axes.set_title("share of rollouts that ran out of tokens", fontsize=10)
    ours = series(rows, metric.member(metric.STOP, "length"), per=metric.ROLLOUT_TRAJECTORIES)
    _line(axes, ours, "rollouts", BLUE)
    axes.set_ylim(bottom=0)
    if max((value for _, value in ours), default=0.0) * NEAR_FACTOR < TRUNCATED_PEAK:
        return f"Truncated rollouts: more than {TRUNCATED_PEAK:.0%} at the peak of stage 1 in the report, then falling."
    axes.axhline(TRUNCATED_PEAK, color=GREY, ls="--", label="report: its peak in stage 1 is above")
    return ""


def _accuracy(axes: Axes, rows: Rows) -> str:
    """Draws held-out accuracy, for AIME beside the report's curves."""
    axes.set_title("held-out accuracy", fontsize=10)
    _line(axes, series(rows, metric.EVAL_ACCURACY), "all", BLUE, marker="o")
    family = metric.of_source(metric.EVAL_ACCURACY, "*")
    names = sorted({name for row in rows for name in row if metric.part_of(family, name)})
    missing = []
    for year, reference, colour in (("24", AIME24, GREEN), ("25", AIME25, RED)):
        own = [name for name in names if "aime" in name.lower() and year in name]
        points = series(rows, own[0]) if own else []
        _line(axes, points, f"AIME{year}", colour, marker="o")
        if not _reference(axes, points, reference, f"report: AIME{year}"):
            missing.append(f"AIME{year} " + ", ".join(f"{value:.1%} at step {step}" for step, value in reference))
    axes.set_ylim(bottom=0)
    return f"Accuracy in the report: {'; '.join(missing)}." if missing else ""


def plot_entropies(path: Path, steps: Sequence[Mapping[str, Any]], policy: Points) -> None:
    """Draws the entropies.

    steps: `token_entropy.shares` with their "step". policy: the learner's own mean entropy by step.
    """
    figure = Figure(figsize=(10, 6.6), layout="constrained")
    axes = figure.subplots(2, 2)
    last = steps[-1]
    _by_kind(axes[0, 0], last)
    _by_position(axes[0, 1], last)
    _after_reply(axes[1, 0], last)
    _over_steps(axes[1, 1], steps, policy)
    for each in axes.flat:
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{last['tokens']:,} sampled tokens of {last['trajectories']} trajectories, step {last['step']}")
    figure.savefig(path, dpi=130)


def _share(value: float | None) -> float:
    return float("nan") if value is None else value


def _by_kind(axes: Axes, last: Mapping[str, Any]) -> None:
    names = list(last["high_among"])
    axes.barh(names[::-1], [_share(last["high_among"][name]) for name in names[::-1]], color=BLUE)
    axes.axvline(_share(last["high_among"]["all"]), color=GREY, ls="--")
    axes.set_title("share of high-entropy tokens among each kind", fontsize=10)


def _by_position(axes: Axes, last: Mapping[str, Any]) -> None:
    at = [part["from"] + 0.05 for part in last["by_position"]]
    kinds = (("high", "all", BLUE), ("high_forking", "forking", GREEN), ("high_reflection", "reflection", RED))
    for name, label, colour in kinds:
        values = [_share(part[name]) for part in last["by_position"]]
        axes.plot(at, values, color=colour, marker="o", ms=4, label=label)
    axes.set(xlabel="position in the trajectory", ylim=(0, None), xlim=(0, 1))
    axes.set_title("share of sampled tokens with high entropy", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _after_reply(axes: Axes, last: Mapping[str, Any]) -> None:
    at = [row["token"] for row in last["after_reply"]]
    kinds = (("high_after_success", "after a result", BLUE), ("high_after_failure", "after a failed call", RED))
    for name, label, colour in kinds:
        values = [_share(row[name]) for row in last["after_reply"]]
        axes.plot(at, values, color=colour, marker=".", label=label)
    axes.axhline(_share(last["high_among"]["all"]), color=GREY, ls="--", label="all tokens")
    axes.set(xlabel="sampled token after a tool's reply", ylim=(0, None))
    axes.set_title("share of high-entropy tokens after replies", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _over_steps(axes: Axes, steps: Sequence[Mapping[str, Any]], policy: Points) -> None:
    at = [row["step"] for row in steps]
    for kind, colour in (("forking", GREEN), ("reflection", RED), ("other", GREY)):
        values = [_share(row["of_high"][kind]) for row in steps]
        axes.plot(at, values, color=colour, marker="o", ms=4, label=f"{kind}, share of high-entropy tokens")
    axes.set(xlabel="step", ylim=(0, 1.02))
    axes.set_title("over training", fontsize=10)
    beside = axes.twinx()
    beside.plot(
        at, [row["entropy"] for row in steps], color=BLUE, ls="--", marker="s", ms=3, label="entropy, this model"
    )
    _line(beside, policy, "entropy, policy in training", BLUE)
    beside.set(ylabel="nats per token", ylim=(0, None))
    handles, labels = axes.get_legend_handles_labels()
    more_handles, more_labels = beside.get_legend_handles_labels()
    beside.legend([*handles, *more_handles], [*labels, *more_labels], frameon=False, fontsize=7)
