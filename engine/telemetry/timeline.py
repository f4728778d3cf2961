"""Collects the events of a run with their times until somebody drains them, and holds the idle clock
and the list of rollouts.

Invariants
- Times are those of `engine.clock`, seconds since 1970. Recording an event is an append.
- Only the newest EVENTS of each kind are kept, so memory is bounded even if nobody drains them; `Events.dropped` counts
  the spans and instants that are not. A full deque of spans takes some 100 MB.
- Spans that have a `key` belong to that trajectory.
- Spans that overlap in time never share a lane: a lane is taken for as long as its owner lives.
- Engine steps are merged as they come: all steps of a replica that end within BUCKET_S are one.

`engine.recording` writes the events down; `engine.recording.trace` turns them into a file for Perfetto.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine import clock as run_clock
from engine.replica.port import KvSample
from engine.telemetry.idle_clock import IdleClock, Interval
from engine.telemetry.in_flight import InFlight

# Perfetto shows the tracks in this order.
TRACKS = (
    *("replicas", "fleet", "trajectories", "tool calls", "reward", "stages", "learner", "weights", "evaluation"),
    "nodes",
)
EVENTS = 250_000
BUCKET_S = 0.05


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


class SpanEvent(NamedTuple):
    track: str
    lane: int
    name: str
    start: float
    end: float
    args: dict[str, Any]


class InstantEvent(NamedTuple):
    track: str
    at: float
    name: str
    args: dict[str, Any]


class LagEvent(NamedTuple):
    at: float
    lag_s: float


@dataclass(slots=True)
class StepBucket:
    """The engine steps of a replica that ended between began and at. preempted, prefilled and steps are sums, the other
    fields maxima.
    """

    replica: int
    began: float
    at: float = 0.0
    used_blocks: int = 0
    running: int = 0
    waiting: int = 0
    preempted: int = 0
    prefilled: int = 0
    steps: int = 0

    def add(self, at: float, used_blocks: int, sample: KvSample) -> None:
        self.at = at
        self.used_blocks = max(self.used_blocks, used_blocks)
        self.running = max(self.running, sample.running)
        self.waiting = max(self.waiting, sample.waiting)
        self.preempted += sample.preempted
        self.prefilled += sample.prefilled
        self.steps += sample.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Events:
    """The events between start and end. dropped: spans and instants that were too many to keep."""

    start: float
    end: float
    dropped: int
    spans: deque[SpanEvent]
    instants: deque[InstantEvent]
    steps: list[StepBucket]
    intervals: list[Interval]
    lags: deque[LagEvent]


class Timeline:
    """Collects events for `drain`. Methods raise KeyError for a track that is not in TRACKS."""

    def __init__(self, clock: Callable[[], float] = run_clock.now) -> None:
        self.now = clock  # the loop's clock will not do: uvloop's has whole milliseconds
        self.idle = IdleClock()
        self.in_flight = InFlight(clock)
        self.lanes = {track: Lanes() for track in TRACKS}
        self._since = clock()
        self._clear()

    def _clear(self) -> None:
        self._spans: deque[SpanEvent] = deque(maxlen=EVENTS)
        self._instants: deque[InstantEvent] = deque(maxlen=EVENTS)
        self._buckets: deque[StepBucket] = deque(maxlen=EVENTS)
        self._open_buckets: dict[int, StepBucket] = {}
        self._lags: deque[LagEvent] = deque(maxlen=EVENTS)
        self._dropped = 0

    def span(self, track: str, name: str, start: float, end: float, lane: int = 0, /, **args: Any) -> None:
        _check(track)
        self._dropped += len(self._spans) == EVENTS
        self._spans.append(SpanEvent(track, lane, name, start, end, args))

    def instant(self, track: str, name: str, **args: Any) -> None:
        _check(track)
        self._dropped += len(self._instants) == EVENTS
        self._instants.append(InstantEvent(track, self.now(), name, args))

    def step(self, replica: int, used_blocks: int, sample: KvSample) -> None:
        """Records an engine step, with the state of the replica at its end."""
        now = self.now()
        bucket = self._open_buckets.get(replica)
        if bucket is None or now - bucket.began >= BUCKET_S:
            bucket = self._open_buckets[replica] = StepBucket(replica, now)
            self._buckets.append(bucket)
        bucket.add(now, used_blocks, sample)

    def lag(self, lag_s: float) -> None:
        """Records how late the event loop just served a timer."""
        self._lags.append(LagEvent(self.now(), lag_s))

    @contextmanager
    def idle_cause(self, cause: str) -> Iterator[None]:
        """Inside, replicas may be idle for this cause (`IdleClock.flag`)."""
        self.idle.flag(cause, 1, self.now())
        try:
            yield
        finally:
            self.idle.flag(cause, -1, self.now())

    def drain(self) -> Events:
        """Returns everything since the last call. It is cheap: nothing is copied."""
        now = self.now()
        events = Events(
            start=self._since,
            end=now,
            dropped=self._dropped,
            spans=self._spans,
            instants=self._instants,
            steps=list(self._buckets),
            intervals=self.idle.drain(now),
            lags=self._lags,
        )
        self._since = now
        self._clear()
        return events


def _check(track: str) -> None:
    if track not in TRACKS:
        raise KeyError(track)
