"""Reads the runs of a comparison: held-out figures by step, figures of whole runs, and their paired differences.

Promises
- What is compared is paired by seed, and only where all arms have a figure.
- An interval is Student's over the seeds, at 95 %: it says how another seed would do, not how other problems would.

Shape legend: S seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from algo.eval_stats import Interval, mean_of_runs
from engine import metric_names as metric
from recipes.tiny.arms import Runs

METRICS = {
    metric.EVAL_ACCURACY: "held-out accuracy",
    metric.EVAL_TOOL_ERROR_SHARE_CORRECT: "tool errors in correct trajectories",
}
RATIO = " / "
TICKS = 12  # of a picture's axis at most
COLOURS = ("#08519c", "#cb181d", "#238b45")

Rows = list[dict[str, Any]]
Curves = dict[str, dict[int, list[float]]]  # arm -> step -> values_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure of a whole run. of: computes it from the rows of the run's metrics. form: a format specification."""

    title: str
    of: Callable[[Rows], float]
    form: str = ".3f"


def sampled_tokens(rows: Rows) -> float:
    return sum(row.get(metric.TOKENS_GENERATED, 0.0) for row in rows)


def train_seconds(rows: Rows) -> float:
    """Returns the seconds of training, without starts and evaluations."""
    return sum(row.get(metric.TIME_STEP_S, 0.0) for row in rows)


FIGURES = (
    Figure(title="sampled tokens", of=sampled_tokens, form=",.0f"),
    Figure(title="seconds of training", of=train_seconds, form=".0f"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What the finished runs say.

    titles[arm]: its name for people. curves[metric][arm][step] and figures[title][arm]: the values of all seeds.
    forms[metric or title]: how a figure is written. metrics[metric]: its name for people.
    """

    seeds: tuple[int, ...]
    titles: dict[str, str]
    curves: dict[str, Curves]
    figures: dict[str, dict[str, list[float]]]
    forms: dict[str, str]
    versions: dict[str, str]
    metrics: dict[str, str] = field(default_factory=lambda: dict(METRICS))


def compare(
    runs: Runs,
    names: Sequence[str],
    figures: Sequence[Figure] = FIGURES,
    metrics: Mapping[str, str] = METRICS,
    until: int | None = None,
) -> Comparison:
    """Reads the runs of these arms. Raises ValueError when one lacks an evaluation that another one has.

    metrics: what is compared by step, with its name for people; "a / b" is the ratio of two metrics. until: the last
    step that counts; none: all steps.
    """
    rows = {name: [_until(rows_of(runs, name, seed), until) for seed in runs.seeds] for name in names}
    since = max(_begins(runs, name) for name in names)
    curves = {
        name: {arm: _by_step([row for run in rows[arm] for row in run], name, since) for arm in names}
        for name in metrics
    }
    for name, by_arm in curves.items():
        steps = {tuple(sorted(curve)) for curve in by_arm.values()}
        counts = {len(values_S) for curve in by_arm.values() for values_S in curve.values()}
        if len(steps) != 1 or counts != {len(runs.seeds)}:
            raise ValueError(f"{runs.folder}: the runs do not have the same evaluations of {name}")
    return Comparison(
        seeds=tuple(runs.seeds),
        titles={name: runs.arms[name].title for name in names},
        curves=curves,
        figures={each.title: {name: [each.of(run) for run in rows[name]] for name in names} for each in figures},
        forms={each.title: each.form for each in figures} | {name: ".1f" for name in metrics if RATIO in name},
        versions=_versions(runs, names),
        metrics=dict(metrics),
    )


def joined(earlier: Comparison, later: Comparison) -> Comparison:
    """Returns the seeds of both, those of `later` where both have one.

    Raises ValueError unless both have the same arms, evaluations and figures.
    """
    if (kept := _measured(earlier)) != (new := _measured(later)):
        raise ValueError(f"seeds can be joined only where the same was measured, got {kept} and {new}")
    seeds = sorted({*earlier.seeds, *later.seeds})

    def values(kept_S: Sequence[float], new_S: Sequence[float]) -> list[float]:
        by_seed = dict(zip(earlier.seeds, kept_S, strict=True)) | dict(zip(later.seeds, new_S, strict=True))
        return [by_seed[seed] for seed in seeds]

    return replace(
        later,
        seeds=tuple(seeds),
        curves={
            name: {
                arm: {step: values(earlier.curves[name][arm][step], new_S) for step, new_S in curve.items()}
                for arm, curve in by_arm.items()
            }
            for name, by_arm in later.curves.items()
        },
        figures={
            title: {arm: values(earlier.figures[title][arm], new_S) for arm, new_S in by_arm.items()}
            for title, by_arm in later.figures.items()
        },
    )


def _measured(result: Comparison) -> tuple[list[str], dict[str, list[int]], list[str]]:
    """Returns the arms, the steps of each metric, and the titles of the figures."""
    return list(result.titles), {name: _steps(by_arm) for name, by_arm in result.curves.items()}, list(result.figures)


def _versions(runs: Runs, names: Sequence[str]) -> dict[str, str]:
    """Returns the versions with which the first run was made."""
    return json.loads((runs.path(names[0], runs.seeds[0]) / "config.json").read_text())["versions"]


def rows_of(runs: Runs, name: str, seed: int) -> Rows:
    """Returns the rows of a run's metrics, after those of the run that it goes on from, whose steps come first.

    Where one ends and the next begins, the evaluation of the next counts: it may have another budget.
    """
    path, before = runs.path(name, seed) / "metrics.jsonl", runs.arms[name].after
    own: Rows = [json.loads(line) for line in path.read_text().splitlines()]
    if before is None:
        return own
    earlier = rows_of(runs, before, seed)
    steps = _last_step(earlier)
    return [
        *(row if row["step"] < steps else _without_evaluation(row) for row in earlier),
        *({**row, "step": row["step"] + steps} for row in own),
    ]


def _without_evaluation(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("eval/")}


def _until(rows: Rows, step: int | None) -> Rows:
    return [row for row in rows if step is None or row["step"] <= step]


def _begins(runs: Runs, name: str) -> int:
    """Returns the step at which an arm's own run begins."""
    before = runs.arms[name].after
    return 0 if before is None else _last_step(rows_of(runs, before, runs.seeds[0]))


def _last_step(rows: Rows) -> int:
    return max(int(row["step"]) for row in rows)


def _by_step(rows: Rows, name: str, since: int) -> dict[int, list[float]]:
    """Returns the values of a metric by step, in the order of the rows."""
    values: dict[int, list[float]] = {}
    over, _, under = name.partition(RATIO)
    for row in rows:
        if over in row and row["step"] >= since:
            values.setdefault(int(row["step"]), []).append(row[over] / row[under] if under else row[over])
    return values


def difference(ours_S: Sequence[float], theirs_S: Sequence[float]) -> Interval:
    """Returns the mean of ours - theirs, paired by seed."""
    return mean_of_runs([ours - theirs for ours, theirs in zip(ours_S, theirs_S, strict=True)])


def intervals(values: Mapping[str, Sequence[float]]) -> dict[str, Interval]:
    """Returns an interval for each arm, and for the first one's difference to each other one. values[arm]: [S]."""
    first, *others = values
    return {
        **{name: mean_of_runs(values_S) for name, values_S in values.items()},
        **{f"{first} - {other}": difference(values[first], values[other]) for other in others},
    }


def _at(curves: Curves, step: int) -> dict[str, list[float]]:
    return {name: curve[step] for name, curve in curves.items()}


def _steps(curves: Curves) -> list[int]:
    return sorted(next(iter(curves.values())))


def markdown(result: Comparison) -> str:
    """Returns a table for each metric by step, and one of the figures of whole runs."""
    blocks = []
    for name, title in result.metrics.items():
        curves, form = result.curves[name], result.forms.get(name, ".3f")
        rows = {str(step): _at(curves, step) for step in _steps(curves)}
        blocks.append(_table(result, title, "step", rows, dict.fromkeys(rows, form)))
    return "\n\n".join([*blocks, _table(result, "whole runs", "", result.figures, result.forms)])


def _table(
    result: Comparison,
    title: str,
    corner: str,
    rows: Mapping[str, Mapping[str, Sequence[float]]],
    forms: Mapping[str, str],
) -> str:
    first, *others = result.titles
    heads = [*result.titles.values(), *(f"{result.titles[first]} - {result.titles[other]}" for other in others)]
    lines = [f"**{title[0].upper()}{title[1:]}**", "", f"| {corner} | {' | '.join(heads)} |"]
    lines.append("|---" * (1 + len(heads)) + "|")
    for head, values in rows.items():
        cells = [_cell(interval, forms[head], signed=" - " in name) for name, interval in intervals(values).items()]
        lines.append(f"| {head} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(interval: Interval, form: str, *, signed: bool) -> str:
    form = f"{'+' if signed else ''}{form}"
    return f"{interval.mean:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def as_json(result: Comparison) -> dict[str, Any]:
    """Returns what JSON can hold: every value of every seed, and the intervals by step and of whole runs, which one
    seed alone does not have.
    """
    if len(result.seeds) < 2:
        return {"values": asdict(result)}
    by_step = {
        name: {str(step): _plain(intervals(_at(curves, step))) for step in _steps(curves)}
        for name, curves in result.curves.items()
    }
    whole_runs = {title: _plain(intervals(values)) for title, values in result.figures.items()}
    return {"values": asdict(result), "intervals": {"by_step": by_step, "whole_runs": whole_runs}}


def from_json(content: Mapping[str, Any]) -> Comparison:
    """Returns the comparison that `as_json` wrote."""
    return msgspec.convert(content["values"], Comparison, strict=False)  # the steps are texts in JSON


def _plain(cells: Mapping[str, Interval]) -> dict[str, dict[str, float]]:
    return {name: asdict(interval) for name, interval in cells.items()}


def plot(path: Path, result: Comparison) -> None:
    """Draws the metrics over the steps, two beside each other, with the band of the interval, as a PNG."""
    from matplotlib.figure import Figure as Canvas

    lines = -(-len(result.metrics) // 2)
    canvas = Canvas(figsize=(9, 3.8 * lines), layout="constrained")
    grid = canvas.subplots(lines, 2).ravel().tolist()
    for axes, (name, title) in zip(grid, result.metrics.items(), strict=False):
        curves, steps = result.curves[name], _steps(result.curves[name])
        for colour, (arm, curve) in zip(COLOURS, curves.items(), strict=False):
            means = [mean_of_runs(curve[step]) for step in steps]
            low, high = [each.low for each in means], [each.high for each in means]
            axes.fill_between(steps, low, high, color=colour, alpha=0.2, lw=0)
            middle = [each.mean for each in means]
            axes.plot(steps, middle, color=colour, marker="o", ms=4, label=result.titles[arm], clip_on=False)
        largest = max(mean_of_runs(curve[step]).mean for curve in curves.values() for step in steps)
        top = min(axes.get_ylim()[1], 2 * largest or 1.0)  # of two seeds a band can be many times as high
        top = min(top, 1.02) if largest <= 1 else top
        ticks = steps[:: -(-len(steps) // TICKS)]
        axes.set(xlabel="step", title=title, xlim=(min(steps), max(steps)), xticks=ticks, ylim=(0, top))
        axes.grid(alpha=0.25)
        axes.spines[["right", "top"]].set_visible(False)
        axes.legend(frameon=False)
    canvas.suptitle(f"Mean and 95 % interval over {len(result.seeds)} seeds")
    canvas.savefig(path, dpi=130)
