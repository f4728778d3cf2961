"""Says from which step on a run got slower or faster, and what changed there. Pure: rows of metrics.jsonl go in.

`engine.diagnosis.shifts` finds the steps on the logarithm of the seconds of a step. At each of them

- the difference in seconds is split into parts that add up to it (`engine.diagnosis.step_seconds`);
- metrics that jumped there beyond their own scatter, in the direction that explains the change, are its reasons: those
  that can be a cause first, such as other processes on the machine, then those that only follow.

Steps for which a resumed run took trajectories from its journal are left out, since they did less work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine import metric_names as metric
from engine.diagnosis.shifts import shifts
from engine.diagnosis.step_seconds import GERUNDS, parts_of

Row = Mapping[str, Any]
Kind = Literal["ratio", "share", "count"]

LEAST = math.log(1.05)  # smaller changes of the seconds of a step are not worth a sentence
NEAR = 10  # steps on either side of a change that are compared: more would mix in what changes slowly
SIGMA = 4.0  # a metric has jumped if its medians differ by so many standard errors,
LEAST_RATIO = math.log(1.1)  # and by this much at least,
LEAST_SHARE = 0.05  # or as a share
NAMED = 3  # reasons and parts in a sentence


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """A metric that jumped at a change. before, after: its medians on either side. text: a clause for a sentence."""

    metric: str
    before: float
    after: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A step from which on steps take longer or shorter.

    step: the first one of the new pace. before, after: first and last of the steps that are compared, at most NEAR on
    either side. before_s, after_s: median seconds of a step in them. parts: by which their mean seconds differ, the
    largest first; they add up to the difference of the means. resumed: the run was resumed in between.
    """

    step: int
    before: tuple[int, int]
    after: tuple[int, int]
    before_s: float
    after_s: float
    parts: Mapping[str, float]
    reasons: tuple[Reason, ...]
    resumed: bool
    sentence: str

    @property
    def ratio(self) -> float:
        return self.after_s / self.before_s


@dataclass(frozen=True, slots=True)
class _Watched:
    """A metric that may explain a change. slower: whether a larger (1) or a smaller (-1) value makes steps longer."""

    name: str
    kind: Kind
    slower: int
    text: str


# Causes first, then what only follows.
_WATCHED = (
    _Watched(metric.HOST_OTHERS_CPU_SHARE, "share", 1, "other processes use {after} of the cores ({before} before)"),
    _Watched(metric.REPLICAS_LIVE, "count", -1, "{after} replicas serve ({before} before)"),
    _Watched(metric.NODES_LIVE, "count", -1, "{after} nodes take part ({before} before)"),
    _Watched(metric.ROLLOUT_TRAJECTORIES, "ratio", 1, "trajectories per step {times}"),
    _Watched(metric.ROLLOUT_RESPONSE_TOKENS, "ratio", 1, "tokens per trajectory {times}"),
    _Watched("tool calls per trajectory", "ratio", 1, "tool calls per trajectory {times}"),
    _Watched("blocked loop", "share", 1, "the event loop stands still for {after} of the time ({before} before)"),
    _Watched(metric.HOST_LOOP_LAG_MAX_MS, "ratio", 1, "the longest stall of the event loop {times}"),
    _Watched(metric.TOOLS_LATENCY_P50_MS, "ratio", 1, "the latency of tool calls {times}"),
    _Watched("preemptions", "count", 1, "{after} preemptions a step ({before} before)"),
    _Watched("kv", "share", 1, "trajectories wait for KV blocks for {after} of the time ({before} before)"),
    _Watched("tail", "share", 1, "the last rollouts take {after} of the time ({before} before)"),
    _Watched(
        metric.ROLLOUT_PREFIX_HIT_RATE, "share", -1, "{after} of the prompts come from the cache ({before} before)"
    ),
    _Watched(metric.LEARNER_TOKENS_PER_S, "ratio", -1, "the learner's tokens per second {times}"),
    _Watched(metric.LEARNER_PUBLISH_S, "ratio", 1, "publishing the weights {times}"),
    _Watched(metric.TOKENS_PER_S, "ratio", -1, "sampled tokens per second {times}"),
    _Watched(metric.HOST_MACHINE_CPU_SHARE, "share", 1, "the cores are busy for {after} of the time ({before} before)"),
)


def changes(rows: Sequence[Row]) -> list[Change]:
    """Returns the changes of pace in the order of their steps; none for a run of fewer than six steps.

    rows: those of metrics.jsonl, in order.

    >>> rows = [{"step": n, "time/step_s": 2.0 if n < 10 else 16.0, "host/others_cpu_share": 0.03 if n < 10 else 0.95}
    ...         for n in range(1, 14)]
    >>> print(changes(rows)[0].sentence)
    From step 10 on a step takes 8.0 times as long as at steps 1 to 9 (16 s, 2.0 s before): other processes use 95 % of the cores (3 % before).
    """  # noqa: E501
    timed = [row for row in rows if row.get(metric.TIME_STEP_S, 0.0) > 0]
    whole = [row for row in timed if metric.ROLLOUT_TRAJECTORIES_RESUMED not in row]
    if not whole:
        return []
    ends = [0, *shifts(np.log([row[metric.TIME_STEP_S] for row in whole]), LEAST), len(whole)]
    resumed = [int(row["step"]) for row in timed if metric.ROLLOUT_TRAJECTORIES_RESUMED in row]
    return [
        _change(whole[first:at], whole[at:last], resumed)
        for first, at, last in zip(ends, ends[1:], ends[2:], strict=False)
    ]


def _change(before: Sequence[Row], after: Sequence[Row], resumed: Sequence[int]) -> Change:
    step, last = int(after[0]["step"]), int(before[-1]["step"])
    near = before[-NEAR:], after[:NEAR]
    before_s, after_s = (float(np.median([row[metric.TIME_STEP_S] for row in rows])) for rows in near)
    direction = 1 if after_s > before_s else -1
    parts = _parts(*near)
    reasons = tuple(reason for each in _WATCHED if (reason := _reason(each, *near, direction)) is not None)
    was_resumed = any(last <= number <= step for number in resumed)
    compared = int(near[0][0]["step"]), last
    clauses = _clauses(parts, reasons, was_resumed, direction)
    return Change(
        step=step,
        before=compared,
        after=(step, int(near[1][-1]["step"])),
        before_s=before_s,
        after_s=after_s,
        parts=parts,
        reasons=reasons,
        resumed=was_resumed,
        sentence=_sentence(step, compared, before_s, after_s, clauses),
    )


def _parts(before: Sequence[Row], after: Sequence[Row]) -> dict[str, float]:
    """Returns by how much each part of the mean step differs, the largest difference first."""
    means = []
    for rows in (before, after):
        split = [parts_of(row) for row in rows]
        names = {name for parts in split for name in parts}
        means.append({name: sum(parts.get(name, 0.0) for parts in split) / len(split) for name in names})
    every = sorted(means[0].keys() | means[1].keys())
    differences = {name: means[1].get(name, 0.0) - means[0].get(name, 0.0) for name in every}
    return dict(sorted(differences.items(), key=lambda part: -abs(part[1])))


def _reason(watched: _Watched, before: Sequence[Row], after: Sequence[Row], direction: int) -> Reason | None:
    """Returns the metric as a reason if it jumped in the direction that explains longer (1) or shorter (-1) steps."""
    sides = [_values(watched.name, rows) for rows in (before, after)]
    if min(map(len, sides)) < 3:
        return None
    low, high = (float(np.median(side)) for side in sides)
    if watched.kind == "ratio":
        if min(low, high) <= 0:
            return None
        sides = [np.log(np.maximum(side, 1e-12)) for side in sides]
        size, least = math.log(high / low), LEAST_RATIO
    else:
        size, least = high - low, LEAST_SHARE if watched.kind == "share" else 0.5
    error = math.sqrt(sum(_scatter(side) ** 2 / len(side) for side in sides)) * 1.25  # of a difference of medians
    if size * direction * watched.slower <= 0 or abs(size) < max(least, SIGMA * error):
        return None
    shown = (_percent(low), _percent(high)) if watched.kind == "share" else (f"{low:.0f}", f"{high:.0f}")
    text = watched.text.format(before=shown[0], after=shown[1], times=_times(high / low) if low > 0 else "")
    return Reason(metric=watched.name, before=low, after=high, text=text)


def _values(name: str, rows: Sequence[Row]) -> NDArray[np.float64]:
    """Returns the values of a metric, or of a figure that is made of several, by row; rows without it are left out."""
    values = []
    for row in rows:
        step_s = row[metric.TIME_STEP_S]
        match name:
            case "blocked loop":
                value, per = row.get(metric.HOST_LOOP_BLOCKED_S), step_s
            case "kv":
                value, per = row.get(metric.KV_BLOCKED_S), step_s
            case "tail":
                value, per = row.get(metric.ROLLOUT_TAIL_S), step_s
            case "tool calls per trajectory":
                value, per = row.get(metric.TOOLS_CALLS), row.get(metric.ROLLOUT_TRAJECTORIES, 0)
            case "preemptions":
                value, per = row.get(metric.KV_PREEMPTIONS), 1
            case _:
                value, per = row.get(name), 1
        if value is not None and per:
            values.append(value / per)
    return np.asarray(values, np.float64)


def _scatter(values: NDArray[np.float64]) -> float:
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _clauses(parts: Mapping[str, float], reasons: Sequence[Reason], resumed: bool, direction: int) -> list[str]:
    clauses = ["the run was resumed there"] if resumed else []
    clauses += [reason.text for reason in reasons][:NAMED]
    total = sum(parts.values())
    large = [(name, value) for name, value in parts.items() if value * direction >= 0.2 * abs(total)][:NAMED]
    if len(parts) > 1 and large:
        word = "more" if direction > 0 else "less"
        clauses.append(
            ", ".join(f"{_seconds(abs(value))} {word} for {GERUNDS.get(name, name)}" for name, value in large)
        )
    return clauses


def _sentence(step: int, before: tuple[int, int], before_s: float, after_s: float, clauses: Sequence[str]) -> str:
    ratio = after_s / before_s
    much = f"{abs(100 * (ratio - 1)):.0f} % {'longer' if ratio > 1 else 'less'} than"
    pace = f"{ratio:.1f} times as long as" if ratio >= 1.95 else much
    told = "; ".join(clauses) if clauses else "no metric says why"
    return (
        f"From step {step} on a step takes {pace} at steps {before[0]} to {before[1]} "
        f"({_seconds(after_s)}, {_seconds(before_s)} before): {told}."
    )


def _times(ratio: float) -> str:
    return f"x {ratio:.1f}" if ratio >= 1 else f"/ {1 / ratio:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s" if value >= 1 else f"{value:.2f} s"
