"""The timeline of a run in Chrome's trace format (open it in Perfetto), and the idle clock that reads the same events.

Invariants
- Times are seconds of one monotonic clock; recording is an append, formatting happens when the file is written.
- The newest EVENTS of each kind are kept: memory is bounded however long the run.
- Spans that have a `key` belong to that trajectory: its turns and tool calls are joined by arrows.
- Spans that overlap in time never share a lane: a lane is taken for as long as its owner lives.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine.atomic_files import write_whole
from engine.replica.port import KvSample
from engine.telemetry.idle_clock import IdleClock

# Tracks in the order in which Perfetto shows them.
TRACKS = ("replicas", "fleet", "trajectories", "tool calls", "reward", "learner", "weights", "evaluation", "nodes")
EVENTS = 250_000
_PIDS = {track: pid for pid, track in enumerate(TRACKS)}


class Lanes:
    """Hands out the lowest free lane of a track."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def give(self, lane: int) -> None:
        heapq.heappush(self._free, lane)


class _Span(NamedTuple):
    pid: int
    lane: int
    name: str
    start: float
    end: float
    args: dict[str, Any]


class _Instant(NamedTuple):
    pid: int
    at: float
    name: str
    args: dict[str, Any]


class _Step(NamedTuple):
    replica: int
    at: float
    used_blocks: int
    running: int
    waiting: int


class Timeline:
    """Collects what happened, for `write`. Raises KeyError for a track that is not in TRACKS."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now = clock  # not the loop's clock: uvloop counts in whole milliseconds
        self.idle = IdleClock()
        self.lanes = {track: Lanes() for track in TRACKS}
        self._spans: deque[_Span] = deque(maxlen=EVENTS)
        self._instants: deque[_Instant] = deque(maxlen=EVENTS)
        self._steps: deque[_Step] = deque(maxlen=EVENTS)

    def span(self, track: str, name: str, start: float, end: float, lane: int = 0, /, **args: Any) -> None:
        self._spans.append(_Span(_PIDS[track], lane, name, start, end, args))

    def instant(self, track: str, name: str, **args: Any) -> None:
        self._instants.append(_Instant(_PIDS[track], self.now(), name, args))

    def step(self, replica: int, used_blocks: int, sample: KvSample) -> None:
        """One engine step: blocks in use, running and waiting requests at its end."""
        self._steps.append(_Step(replica, self.now(), used_blocks, sample.running, sample.waiting))

    @contextmanager
    def idle_cause(self, cause: str) -> Iterator[None]:
        """Inside, replicas that stand idle do so for this cause (`IdleClock.flag`)."""
        self.idle.flag(cause, 1, self.now())
        try:
            yield
        finally:
            self.idle.flag(cause, -1, self.now())

    def write(self, path: Path) -> None:
        """Writes the trace, an event at a time, complete or not at all (a second Ctrl-C). Raises CannotWrite."""
        events = (msgspec.json.encode(event, enc_hook=float) for event in self._events())
        first = b'{"displayTimeUnit":"ms","traceEvents":[' + next(events)
        write_whole(path, chain([first], (b",\n" + event for event in events), [b"]}\n"]))

    def _events(self) -> Iterator[dict[str, Any]]:
        times = chain(
            (span.start for span in self._spans),
            (instant.at for instant in self._instants),
            (step.at for step in self._steps),
        )
        start = min(times, default=0.0)

        def us(seconds: float) -> int:  # whole: spans that meet must not overlap by a rounding, Perfetto drops one
            return round((seconds - start) * 1e6)

        for pid, track in enumerate(TRACKS):
            yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": track}}
            yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
        for pid, lane in sorted({(span.pid, span.lane) for span in self._spans}):
            name = f"{TRACKS[pid]} {lane}"
            yield {"ph": "M", "pid": pid, "tid": lane, "name": "thread_name", "args": {"name": name}}
        for span in self._spans:
            event = {"ph": "X", "pid": span.pid, "tid": span.lane, "name": span.name, "ts": us(span.start)}
            yield {**event, "dur": us(span.end) - us(span.start), "args": span.args}
        for flow in self._flows():
            for number, span in enumerate(flow):
                kind = "s" if number == 0 else "f" if number == len(flow) - 1 else "t"
                event = {"ph": kind, "pid": span.pid, "tid": span.lane, "name": "trajectory", "cat": "trajectory"}
                yield {**event, "id": span.args["key"], "ts": us(span.start), "bp": "e"}
        for instant in self._instants:
            event = {"ph": "i", "pid": instant.pid, "tid": 0, "name": instant.name, "ts": us(instant.at), "s": "t"}
            yield {**event, "args": instant.args}
        for replica, at, used, running, waiting in self._steps:
            counter = {"ph": "C", "pid": _PIDS["replicas"], "ts": us(at)}
            yield {**counter, "name": f"replica {replica} KV blocks", "args": {"used": used}}
            requests = {"running": running, "waiting": waiting}
            yield {**counter, "name": f"replica {replica} requests", "args": requests}

    def _flows(self) -> list[list[_Span]]:
        """The spans of each trajectory that has several, in their order: Perfetto joins them by arrows."""
        flows: dict[int, list[_Span]] = defaultdict(list)
        for span in self._spans:
            if "key" in span.args:
                flows[span.args["key"]].append(span)
        return [sorted(flow, key=lambda span: span.start) for flow in flows.values() if len(flow) > 1]
