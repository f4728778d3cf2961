"""Why a replica was idle. Pure: state changes and the time go in, seconds by cause come out.

Invariant: for each replica, busy + the seconds of all causes = the time observed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

# The first that holds counts.
CAUSES = ("down", "weight_sync", "kv_blocked", "tool_wait", "long_tail", "staleness_gate", "reward", "host")


@dataclass(slots=True)
class _Replica:
    up: bool = True
    running: int = 0
    tools: int = 0  # trajectories that left this replica for a tool
    since: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def busy(self) -> bool:
        return self.up and self.running > 0


class IdleClock:
    """Seconds of each replica by cause.

    A replica without a running request is idle because of the first of these that holds: it is dead; weights are
    updated; a trajectory waits for placement; one that ran here waits for a tool; another replica still runs; the
    learner has the turn (no lease is free); a reward is being computed; else the host's own work.

    An event costs time for the replicas that are idle only: what happens around a busy one changes nothing for it.
    """

    def __init__(self) -> None:
        self._replicas: dict[int, _Replica] = {}
        self._idle: dict[int, _Replica] = {}
        self._running = 0
        self._flags: dict[str, int] = {"weight_sync": 0, "kv_blocked": 0, "staleness_gate": 0, "reward": 0}

    def replica(self, index: int, now: float) -> None:
        """Begins to observe a replica, or goes on after it was replaced."""
        self._settle_idle(now)
        replica = self._replicas.setdefault(index, _Replica(since=now))
        replica.up = True
        self._sort(index, replica)

    def down(self, index: int, now: float) -> None:
        """The replica died; what still counts as running there has not noticed yet."""
        self._settle_idle(now)
        replica = self._replicas[index]
        self._settle(replica, now)
        replica.up = False
        self._sort(index, replica)

    def running(self, index: int, change: int, now: float) -> None:
        self._settle_idle(now)
        replica = self._replicas[index]
        if replica.busy != (replica.up and replica.running + change > 0):
            self._settle(replica, now)
        replica.running += change
        self._running += change
        self._sort(index, replica)

    def tools(self, index: int, change: int, now: float) -> None:
        self._settle_idle(now)
        self._replicas[index].tools += change

    def flag(self, cause: str, change: int, now: float) -> None:
        """Counts what is under way of a cause that is not tied to one replica. Raises KeyError for another cause."""
        self._settle_idle(now)
        self._flags[cause] += change

    def seconds(self, now: float) -> dict[int, dict[str, float]]:
        """{replica: {"busy" | cause: seconds}} so far."""
        for replica in self._replicas.values():
            self._settle(replica, now)
        return {index: dict(replica.seconds) for index, replica in self._replicas.items()}

    def _sort(self, index: int, replica: _Replica) -> None:
        """Into the idle ones or out of them."""
        if replica.busy:
            self._idle.pop(index, None)
        else:
            self._idle[index] = replica

    def _settle_idle(self, now: float) -> None:
        """Before anything changes that a cause may depend on."""
        for replica in self._idle.values():
            self._settle(replica, now)

    def _settle(self, replica: _Replica, now: float) -> None:
        if now > replica.since:
            replica.seconds[self._cause(replica)] += now - replica.since
            replica.since = now

    def _cause(self, replica: _Replica) -> str:
        if replica.busy:
            return "busy"
        others = self._running - replica.running
        holds = {**self._flags, "down": not replica.up, "tool_wait": replica.tools, "long_tail": others, "host": 1}
        return next(cause for cause in CAUSES if holds[cause])
