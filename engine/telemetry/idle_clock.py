"""Why a replica was idle. Pure: state changes and the time go in, seconds by cause and intervals come out.

Invariants
- For each replica, busy + the seconds of all causes = the time observed.
- The intervals of a replica follow one another without a gap from one `drain` to the next; of an observer that never
  drains, the newest INTERVALS are kept.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

import msgspec

from engine.telemetry.occupancy import Occupancy

INTERVALS = 50_000  # of all replicas
# The first that holds counts.
CAUSES = ("down", "weight_sync", "kv_blocked", "tool_wait", "long_tail", "staleness_gate", "reward", "host")


class Interval(msgspec.Struct, array_like=True):
    """A replica had one cause, or "busy", from start to end."""

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
    last: Interval | None = None  # the interval that goes on


class IdleClock:
    """Seconds of each replica by cause.

    A replica without a running request is idle because of the first of these that holds: it is dead; weights are
    updated; a trajectory waits for placement; one that ran here waits for a tool; another replica's still run or
    wait for theirs; the learner has the turn (no lease is free); a reward is being computed; else the host's own work.
    """

    def __init__(self) -> None:
        self._replicas: dict[int, _Replica] = {}
        self._intervals: deque[Interval] = deque(maxlen=INTERVALS)
        # "lease", admission waits for one, is no cause: nothing more is wanted while a step's rollouts are under way
        flags = ("weight_sync", "kv_blocked", "staleness_gate", "reward", "lease")
        self._flags = dict.fromkeys(flags, 0)
        self._held = dict.fromkeys(flags, 0.0)  # seconds, until the flag was raised last
        self._raised = dict.fromkeys(flags, 0.0)  # when
        self.occupancy = Occupancy()

    def replica(self, index: int, now: float) -> None:
        """Begins to observe a replica, or goes on after it was replaced."""
        self._tick(now)
        self._replicas.setdefault(index, _Replica(since=now)).up = True

    def down(self, index: int, now: float) -> None:
        """The replica died; what still counts as running there has not noticed yet."""
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
        """Counts what is under way of a cause that is not tied to one replica. Raises KeyError for another cause."""
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
        """{flag: seconds in which it was up so far}, whether a replica was idle or not."""
        return {
            cause: seconds + (now - self._raised[cause] if self._flags[cause] else 0.0)
            for cause, seconds in self._held.items()
        }

    def _count(self, before: int, change: int, now: float) -> None:
        """A cause begins or ends to hold with a count that leaves or reaches zero; only then is there something to do,
        which costs as much as there are replicas.
        """
        if not before or not before + change:
            self._tick(now)

    def seconds(self, now: float) -> dict[int, dict[str, float]]:
        """{replica: {"busy" | cause: seconds}} so far."""
        self._tick(now)
        return {index: dict(replica.seconds) for index, replica in self._replicas.items()}

    def drain(self, now: float) -> list[Interval]:
        """The intervals since the last time, in the order of their starts; one that goes on is cut here."""
        self._tick(now)
        found, self._intervals = list(self._intervals), deque(maxlen=INTERVALS)
        for replica in self._replicas.values():
            replica.last = None
        return found

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
