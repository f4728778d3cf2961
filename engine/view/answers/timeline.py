"""Answers the page "Where time goes": idle time, spans and engine steps of some steps, on one axis of seconds."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from engine.recording.records import Segment
from engine.telemetry.timeline import TRACKS, SpanEvent
from engine.view.answers.thinning import LANES, density_of, lanes_of, spans_of
from engine.view.answers.trajectories import NotThere
from engine.view.run_files import RunFiles


def timeline_of(run: RunFiles, first: int, last: int) -> dict[str, Any]:
    """Returns the steps from first to last, both included. Raises NotThere if nothing of them was recorded."""
    segments = list(run.recorded.timeline(first, last))
    if not segments:
        kept = run.recorded.timeline_steps
        if not kept:
            raise NotThere("this run has no recorded timeline (record/timeline)")
        raise NotThere(f"the timeline of step {first} is not kept; some of steps {kept[0]} to {kept[-1]} is")
    start = min(segment.start for segment in segments)
    seconds = max(segment.end for segment in segments) - start
    return {
        "first": first,
        "last": last,
        "started_at": start,
        "seconds": seconds,
        "replicas": _replicas(segments, start),
        "tracks": _tracks(segments, start, seconds),
        "lag": [[round(lag.at - start, 5), round(lag.lag_s, 6)] for segment in segments for lag in segment.lags],
        "steps": _step_marks(segments, start),
    }


def _replicas(segments: list[Segment], start: float) -> list[dict[str, Any]]:
    """Returns the idle stretches of each replica of each node, and its engine steps as columns."""
    idle: dict[tuple[str, int], list[list[Any]]] = defaultdict(list)
    steps: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for segment in segments:
        for stretch in segment.idle:
            row = [stretch.cause, round(stretch.start - start, 5), round(stretch.end - start, 5)]
            idle[segment.node, stretch.replica].append(row)
        for engine in segment.engine_steps:
            columns = steps[segment.node, engine.replica]
            columns["at"] += [round(at - start, 4) for at in engine.at.tolist()]
            for name in ("used_blocks", "running", "waiting", "preempted", "prefilled"):
                columns[name] += getattr(engine, name).tolist()
    return [
        {"node": node, "replica": replica, "idle": idle[node, replica], "engine": dict(steps[node, replica])}
        for node, replica in sorted({*idle, *steps})
    ]


def _tracks(segments: list[Segment], start: float, seconds: float) -> list[dict[str, Any]]:
    """Returns the spans by node and track: as columns, or as a density if they have too many lanes."""
    tracks: dict[tuple[str, str], list[SpanEvent]] = defaultdict(list)
    for segment in segments:
        for span in segment.spans:
            tracks[segment.node, span.track].append(span)
    order = {track: number for number, track in enumerate(TRACKS)}
    keys = sorted(tracks, key=lambda key: (key[0], order.get(key[1], len(order))))
    return [{"node": key[0], "track": key[1]} | _shown(tracks[key], start, seconds) for key in keys]


def _shown(spans: list[SpanEvent], start: float, seconds: float) -> dict[str, Any]:
    if lanes_of(spans) > LANES:
        return {"spans": None, "density": density_of(spans, start, seconds)}
    return {"spans": spans_of(spans, start, seconds), "density": None}


def _step_marks(segments: list[Segment], start: float) -> list[list[float]]:
    """Returns [step, from, to] for each step."""
    by_step: dict[int, list[Segment]] = defaultdict(list)
    for segment in segments:
        by_step[segment.step].append(segment)
    return [
        [
            step,
            round(min(segment.start for segment in theirs) - start, 5),
            round(max(segment.end for segment in theirs) - start, 5),
        ]
        for step, theirs in sorted(by_step.items())
    ]
