"""Writes segments as a file in Chrome's trace format, for ui.perfetto.dev.

Invariants
- The file is written an event at a time, whole or not at all.
- Spans that meet do not overlap by a rounding: of two that do, Perfetto drops one.
- Several machines have processes of their own in it, named after them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from engine.atomic_files import write_whole
from engine.recording.records import EngineSteps, Segment
from engine.telemetry.timeline import TRACKS, SpanEvent

Event = dict[str, Any]
EVENTS = 100_000  # bound of the file that each run writes: some 15 MB


def write_trace(path: Path, segments: Sequence[Segment]) -> None:
    """Writes these segments. Raises CannotWrite."""
    events = (msgspec.json.encode(event, enc_hook=float) for event in _events(segments))
    first = b'{"displayTimeUnit":"ms","traceEvents":[' + next(events, b"")
    write_whole(path, chain([first], (b",\n" + event for event in events), [b"]}\n"]))


class _Axis:
    """Process ids and whole microseconds since the earliest event."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        nodes = sorted({segment.node for segment in segments}) or [""]
        self.tracks = [(node, track) for node in nodes for track in TRACKS]
        self._pids = {each: pid for pid, each in enumerate(self.tracks)}
        self._start = min((at for segment in segments for at in _times(segment)), default=0.0)

    def pid(self, node: str, track: str) -> int:
        return self._pids[node, track]

    def us(self, seconds: float) -> int:
        return round((seconds - self._start) * 1e6)


def _times(segment: Segment) -> Iterator[float]:
    yield from (span.start for span in segment.spans)
    yield from (instant.at for instant in segment.instants)
    yield from (float(steps.at[0]) for steps in segment.engine_steps if len(steps.at))


def _events(segments: Sequence[Segment]) -> Iterator[Event]:
    axis = _Axis(segments)
    for pid, (node, track) in enumerate(axis.tracks):
        name = f"{node} {track}" if node else track
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    lanes = {(axis.pid(segment.node, span.track), span.lane) for segment in segments for span in segment.spans}
    for pid, lane in sorted(lanes):
        name = f"{axis.tracks[pid][1]} {lane}"
        yield {"ph": "M", "pid": pid, "tid": lane, "name": "thread_name", "args": {"name": name}}
    for segment in segments:
        yield from _spans(axis, segment)
    yield from _flows(axis, segments)
    for segment in segments:
        for instant in segment.instants:
            pid = axis.pid(segment.node, instant.track)
            event = {"ph": "i", "pid": pid, "tid": 0, "name": instant.name, "ts": axis.us(instant.at), "s": "t"}
            yield {**event, "args": instant.args}
        for steps in segment.engine_steps:
            yield from _counters(axis, segment.node, steps)


def _spans(axis: _Axis, segment: Segment) -> Iterator[Event]:
    for span in segment.spans:
        pid = axis.pid(segment.node, span.track)
        event = {"ph": "X", "pid": pid, "tid": span.lane, "name": span.name, "ts": axis.us(span.start)}
        yield {**event, "dur": axis.us(span.end) - axis.us(span.start), "args": span.args}


def _flows(axis: _Axis, segments: Iterable[Segment]) -> Iterator[Event]:
    """Yields the spans of each trajectory that has several, in order: Perfetto joins them by arrows."""
    flows: dict[tuple[str, int], list[SpanEvent]] = defaultdict(list)
    for segment in segments:
        for span in segment.spans:
            if "key" in span.args:
                flows[segment.node, span.args["key"]].append(span)
    for (node, key), unsorted in flows.items():
        flow = sorted(unsorted, key=lambda span: span.start)
        for number, span in enumerate(flow):
            kind = "s" if number == 0 else "f" if number == len(flow) - 1 else "t"
            pid = axis.pid(node, span.track)
            event = {"ph": kind, "pid": pid, "tid": span.lane, "name": "trajectory", "cat": "trajectory"}
            if len(flow) > 1:
                yield {**event, "id": f"{node}{key}" if node else key, "ts": axis.us(span.start), "bp": "e"}


def _counters(axis: _Axis, node: str, steps: EngineSteps) -> Iterator[Event]:
    for at, used, running, waiting in zip(steps.at, steps.used_blocks, steps.running, steps.waiting, strict=True):
        counter = {"ph": "C", "pid": axis.pid(node, "replicas"), "ts": axis.us(float(at))}
        yield {**counter, "name": f"replica {steps.replica} KV blocks", "args": {"used": int(used)}}
        requests = {"running": int(running), "waiting": int(waiting)}
        yield {**counter, "name": f"replica {steps.replica} requests", "args": requests}
