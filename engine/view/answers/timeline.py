"""Answers the page "Where time goes": idle time, spans and engine steps of some steps, on one axis of seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.recording.columns import Numbers, SpanColumns, TimelineColumns
from engine.recording.records import Doubles
from engine.telemetry.idle_clock import Interval
from engine.view.answers.thinning import (
    LANES,
    PIXELS,
    POINTS,
    WHOLE,
    density_of,
    engine_steps_of,
    idle_of,
    in_view,
    largest_of,
    spans_of,
)
from engine.view.answers.trajectories import NotThere
from engine.view.run_files import RunFiles

LONGEST = 40  # trajectories of the pick "longest"
IDLEST = 8  # replicas of the pick "least busy"
COUNTS = ("used_blocks", "running", "waiting", "preempted", "prefilled")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """What is asked for of the steps from first to last: the seconds from start to end of their axis; None: all.

    longest: only the LONGEST trajectories. idlest: only the IDLEST replicas, those that sample least.
    """

    first: int
    last: int
    start: float | None = None
    end: float | None = None
    longest: bool = False
    idlest: bool = False

    def __post_init__(self) -> None:
        if not (self.start or 0.0) < (self.end or 1e9):
            raise ValueError(f"from must be before to, got {self.start} and {self.end}")


def timeline_of(run: RunFiles, asked: Stretch) -> dict[str, Any]:
    """Returns the timeline with the spans, engine steps and idle seconds of a stretch. `seconds` is the length of all.

    Raises NotThere if nothing of these steps was recorded.
    """
    columns = run.recorded.columns(asked.first, asked.last)
    if columns is None:
        kept = run.recorded.timeline_steps
        if not kept:
            raise NotThere("this run has no recorded timeline (record/timeline)")
        raise NotThere(f"the timeline of step {asked.first} is not kept; some of steps {kept[0]} to {kept[-1]} is")
    zero, seconds = columns.start, columns.end - columns.start
    start = max(0.0, asked.start or 0.0)
    end = max(start + 1e-6, seconds if asked.end is None else min(seconds, asked.end))
    apart = run.config.get("eval_replicas")  # then evaluations have replicas of their own
    replicas = _replicas(columns, zero + start, zero + end, asked.idlest, [] if apart else _evaluations(columns))
    return {
        "first": asked.first,
        "last": asked.last,
        "started_at": zero,
        "seconds": seconds,
        "from": start,
        "to": end,
        "replicas": replicas["shown"],
        "replica_count": replicas["count"],
        "tracks": [_track(spans, zero, zero + start, zero + end, asked.longest) for spans in columns.spans],
        **_lag(columns, zero, start, end),
        "steps": [[step, round(begin - zero, 5), round(finish - zero, 5)] for step, begin, finish in columns.marks],
    }


def _evaluations(columns: TimelineColumns) -> list[tuple[float, float]]:
    """Returns the evaluations as stretches of time."""
    spans = [each for each in columns.spans if each.track == "evaluation"]
    return sorted(
        (start, end) for each in spans for start, end in zip(each.start_S.tolist(), each.end_S.tolist(), strict=True)
    )


def _cut(stretches: Sequence[Interval], evaluations: Sequence[tuple[float, float]]) -> list[Interval]:
    """Returns the stretches in which what a replica did during an evaluation has "evaluation" as its cause."""
    for start, end in evaluations:
        pieces = []
        for stretch in stretches:
            parts = [
                (stretch.cause, stretch.start, min(stretch.end, start)),
                ("evaluation", max(stretch.start, start), min(stretch.end, end)),
                (stretch.cause, max(stretch.start, end), stretch.end),
            ]
            pieces += [Interval(stretch.replica, *part) for part in parts if part[1] < part[2]]
        stretches = pieces
    return list(stretches)


def _replicas(
    columns: TimelineColumns, start: float, end: float, idlest: bool, evaluations: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """Returns the idle stretches of each replica of each node, and its engine steps as columns."""
    stretches: dict[tuple[str, int], list[Interval]] = defaultdict(list)
    steps: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for node, stretch in columns.idle:
        stretches[node, stretch.replica].append(stretch)
    for node, engine in columns.engine_steps:
        steps[node, engine.replica].append(engine)
    keys = sorted({*stretches, *steps})
    count = max(1, len(keys))
    pieces = max(PIXELS // 8, WHOLE // count)
    idle = {key: idle_of(_cut(stretches[key], evaluations), start, end, pieces) for key in keys}
    if idlest:
        keys = sorted(sorted(keys, key=lambda key: _busy_s(idle[key]))[:IDLEST])
    most = max(PIXELS // 8, min(PIXELS, POINTS // max(1, len(keys))))
    shown = [
        {
            "node": node,
            "replica": replica,
            "idle": [
                [cause, round(begin - columns.start, 5), round(finish - columns.start, 5)]
                for cause, begin, finish in idle[node, replica]
            ],
            "engine": _engine(steps[node, replica], columns.start, start, end, most),
        }
        for node, replica in keys
    ]
    return {"shown": shown, "count": count}


def _busy_s(idle: list[tuple[str, float, float]]) -> float:
    return sum(finish - begin for cause, begin, finish in idle if cause == "busy")


def _engine(steps: list[Any], zero: float, start: float, end: float, most: int) -> dict[str, Any]:
    """Returns the engine steps of a replica as columns; {} if it has none."""
    if not steps:
        return {}
    columns: Mapping[str, NDArray[Any]] = {
        name: np.concatenate([getattr(each, name) for each in steps]) for name in ("at", *COUNTS)
    }
    thin = engine_steps_of(columns, start, end, most)
    return {"at": np.round(thin["at"] - zero, 4).tolist(), **{name: thin[name].tolist() for name in COUNTS}}


def _track(spans: SpanColumns, zero: float, start: float, end: float, longest: bool) -> dict[str, Any]:
    """Returns the spans of a track: as columns, or as a density if too many of its lanes are busy."""
    shown_S = in_view(spans, start, end)
    lanes, lanes_S = np.unique(spans.lane_S[shown_S], return_inverse=True)
    answer: dict[str, Any] = {"node": spans.node, "track": spans.track, "lanes": len(lanes), "picked": None}
    if longest and spans.track == "trajectories" and len(lanes) > LONGEST:
        shown_S, lanes_S = _longest(spans, shown_S)
        answer["picked"] = "longest"
    elif len(lanes) > LANES:
        return answer | {"spans": None, "density": density_of(spans, shown_S, start, end - start)}
    return answer | {"spans": spans_of(spans, shown_S, lanes_S, zero, end - start), "density": None}


def _longest(spans: SpanColumns, shown_S: Numbers) -> tuple[Numbers, Numbers]:
    """Returns the spans of the trajectories that take longest, and a lane for each: that of the longest is 0.

    A trajectory is the spans of one lane from the first with its key to the next with another.
    """
    order_S = shown_S[np.lexsort((spans.start_S[shown_S], spans.lane_S[shown_S]))]
    begins_S = np.ones(len(order_S), np.bool_)
    key = None
    lane_S = spans.lane_S[order_S].tolist()
    for place, span in enumerate(order_S.tolist()):
        own = spans.key(span)
        same = place > 0 and lane_S[place] == lane_S[place - 1]
        begins_S[place] = not same or (own is not None and key is not None and own != key)
        key = own if own is not None or not same else key
    first = np.flatnonzero(begins_S)
    lengths = np.maximum.reduceat(spans.end_S[order_S], first) - spans.start_S[order_S][first]
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(-lengths, kind="stable")] = np.arange(len(first))
    rank_S = rank[np.cumsum(begins_S) - 1]
    kept_S = rank_S < LONGEST
    return order_S[kept_S], rank_S[kept_S]


def _lag(columns: TimelineColumns, zero: float, start: float, end: float) -> dict[str, Any]:
    """Returns how late the event loop was where it was looked at: the latest look of each pixel."""
    at_N: Doubles = np.asarray([lag.at for lag in columns.lags]) - zero
    lag_N: Doubles = np.asarray([lag.lag_s for lag in columns.lags])
    if not ((at_N >= start) & (at_N <= end)).any():
        return {"lag": []}
    return {"lag": [[round(at + start, 5), late] for at, late in largest_of(at_N, lag_N, start, end)]}
