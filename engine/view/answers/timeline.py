"""Answers the page "Where time goes": idle time, spans and engine steps of some steps, on one axis of seconds."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from engine.recording.records import Segment
from engine.telemetry.timeline import TRACKS
from engine.view.answers.trajectories import NotThere
from engine.view.run_files import RunFiles

SPANS = 60_000  # spans of one answer: no screen shows more, and the page says how many are left out


def timeline_of(run: RunFiles, first: int, last: int) -> dict[str, Any]:
    """Returns the steps from first to last, both included. Raises NotThere if nothing of them was recorded."""
    segments = list(run.recorded.timeline(first, last))
    if not segments:
        kept = run.recorded.timeline_steps
        if not kept:
            raise NotThere("this run has no recorded timeline (record/timeline)")
        raise NotThere(f"the timeline of step {first} is not kept; some of steps {kept[0]} to {kept[-1]} is")
    start = min(segment.start for segment in segments)
    spans = sum(len(segment.spans) for segment in segments)
    return {
        "first": first,
        "last": last,
        "started_at": start,
        "seconds": max(segment.end for segment in segments) - start,
        "left_out": max(0, spans - SPANS),
        "replicas": _replicas(segments, start),
        "tracks": _tracks(segments, start),
        "instants": [
            [instant.track, round(instant.at - start, 5), instant.name, instant.args]
            for segment in segments
            for instant in segment.instants
        ][:SPANS],
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


def _tracks(segments: list[Segment], start: float) -> list[dict[str, Any]]:
    """Returns the first SPANS spans by node and track, as columns."""
    tracks: dict[tuple[str, str], dict[str, list[Any]]] = {}
    room = SPANS
    for segment in segments:
        for span in segment.spans[:room]:
            columns = tracks.setdefault(
                (segment.node, span.track), {"lane": [], "name": [], "start": [], "end": [], "args": []}
            )
            columns["lane"].append(span.lane)
            columns["name"].append(span.name)
            columns["start"].append(round(span.start - start, 5))
            columns["end"].append(round(span.end - start, 5))
            columns["args"].append(span.args)
        room = max(0, room - len(segment.spans))
    order = {track: number for number, track in enumerate(TRACKS)}
    keys = sorted(tracks, key=lambda key: (key[0], order.get(key[1], len(order))))
    return [{"node": node, "track": track, "spans": tracks[node, track]} for node, track in keys]


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
