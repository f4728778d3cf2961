"""Measures why replicas were idle. Pure: state changes and the time go in, seconds by cause and intervals come out.

Invariants
- For each replica, busy + the seconds of all causes = the time observed.
- The intervals of a replica follow one another without a gap from one `drain` to the next. If nobody drains, the newest
  INTERVALS are kept.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

import msgspec

from engine.telemetry.occupancy import Occupancy

INTERVALS = 50_000  # the most that is kept, over all replicas
# An idle second counts for the first cause that holds.
CAUSES = ("down", "weight_sync", "kv_blocked", "tool_wait", "long_tail", "staleness_gate", "reward", "stage", "host")


class Interval(msgspec.Struct, array_like=True):
    """A stretch of time in which a replica was "busy", or idle for one cause."""

    replica: int
    cause: str
    start: float
    end: float


@dataclass(slots=True)
class _Replica:
    up: bool = True
    running: int = 0
    tools: int = 0  # trajectories that left this replica for a tool
    since: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    last: Interval | None = None  # the interval that is still growing


class IdleClock:
    """Counts the seconds of each replica by cause.

    A replica without a running request is idle because of the first of these that holds: it is dead; weights are being
    updated; a trajectory waits for placement; a trajectory that ran here waits for a tool; trajectories of other
    replicas run or wait for tools; the learner has the turn; a reward is being computed; a stage of the user's works;
    else the host's own work.
    """

    def __init__(self) -> None:
        self._replicas: dict[int, _Replica] = {}
        self._intervals: deque[Interval] = deque(maxlen=INTERVALS)
        # "lease" (admission waits for one) is measured but is no cause: it is also up while all permitted groups run.
        flags = ("weight_sync", "kv_blocked", "staleness_gate", "reward", "stage", "lease")
        self._flags = dict.fromkeys(flags, 0)
        self._held = dict.fromkeys(flags, 0.0)  # seconds up to the last time that the flag was lowered
        self._raised = dict.fromkeys(flags, 0.0)  # the time at which the flag was last raised
        self.occupancy = Occupancy()

    def replica(self, index: int, now: float) -> None:
        """Begins to observe a replica, or resumes after it was replaced."""
        self._tick(now)
        self._replicas.setdefault(index, _Replica(since=now)).up = True

    def down(self, index: int, now: float) -> None:
        """Marks a replica as dead. Its requests may still count as running until they notice."""
        self._tick(now)
        self._replicas[index].up = False

    def running(self, index: int, change: int, now: float) -> None:
        replica = self._replicas[index]
        self._count(replica.running, change, now)
        replica.running += change
        self.occupancy.change(now, running=change)

    def tools(self, index: int, change: int, now: float) -> None:
        replica = self._replicas[index]
        self._count(replica.tools, change, now)
        replica.tools += change
        self.occupancy.change(now, tools=change)

    def flag(self, cause: str, change: int, now: float) -> None:
        """Counts up (change 1) or down (-1) a cause that is tied to no replica. Raises KeyError for any other cause."""
        before = self._flags[cause]
        self._count(before, change, now)
        self._flags[cause] += change
        if not before:
            self._raised[cause] = now
        elif not self._flags[cause]:
            self._held[cause] += now - self._raised[cause]
        if cause == "kv_blocked":
            self.occupancy.change(now, blocked=change)

    def held(self, now: float) -> dict[str, float]:
        """Returns {flag: seconds for which it has been up so far}, whether a replica was idle or not."""
        return {
            cause: seconds + (now - self._raised[cause] if self._flags[cause] else 0.0)
            for cause, seconds in self._held.items()
        }

    def _count(self, before: int, change: int, now: float) -> None:
        """Ticks if the count leaves or reaches zero: no cause changes otherwise, and a tick visits every replica."""
        if not before or not before + change:
            self._tick(now)

    def seconds(self, now: float) -> dict[int, dict[str, float]]:
        """Returns {replica: {"busy" | cause: seconds}} so far."""
        self._tick(now)
        return {index: dict(replica.seconds) for index, replica in self._replicas.items()}

    def drain(self, now: float) -> list[Interval]:
        """Returns the intervals since the last call, in the order of their starts; those still growing are cut here."""
        self._tick(now)
        intervals, self._intervals = list(self._intervals), deque(maxlen=INTERVALS)
        for replica in self._replicas.values():
            replica.last = None
        return intervals

    def _tick(self, now: float) -> None:
        for index, replica in self._replicas.items():
            cause, since = self._cause(replica), replica.since
            replica.seconds[cause] += now - since
            replica.since = now
            if replica.last is not None and replica.last.cause == cause:
                replica.last.end = now
            elif now > since:
                replica.last = Interval(index, cause, since, now)
                self._intervals.append(replica.last)

    def _cause(self, replica: _Replica) -> str:
        if replica.up and replica.running:
            return "busy"
        others = sum(other.running + other.tools for other in self._replicas.values())
        holds = {**self._flags, "down": not replica.up, "tool_wait": replica.tools, "long_tail": others, "host": 1}
        return next(cause for cause in CAUSES if holds[cause])
