"""Measures how full the replicas are, taken together. Pure: counts and the time go in, nearly idle seconds come out.

The idle clock counts a replica as busy while a single request runs there. A run may lose its time that way: of 256
trajectories three are left, or 250 wait for tools. Both are counted here.
"""

from __future__ import annotations

THIN = 8  # replicas are nearly idle while at most one eighth of the step's peak of requests runs


class Occupancy:
    """Counts the seconds since `begin` in which few requests ran and no trajectory waited for placement, by cause.

    starved_s: at least as many trajectories waited for tools as ran. tail_s: nearly all had ended.

    >>> occupancy = Occupancy()
    >>> occupancy.change(0.0, running=16)
    >>> occupancy.change(1.0, running=-15); occupancy.change(4.0, running=-1, tools=1); occupancy.change(6.0, tools=-1)
    >>> occupancy.tail_s, occupancy.starved_s
    (3.0, 2.0)
    """

    def __init__(self) -> None:
        self.starved_s = 0.0
        self.tail_s = 0.0
        self._running = 0
        self._tools = 0
        self._blocked = 0
        self._peak = 0  # most requests that ran at once since the step began
        self._since = 0.0

    def begin(self, now: float) -> None:
        """Begins a step: sets the seconds to 0 and keeps the counts."""
        self.advance(now)
        self.starved_s = self.tail_s = 0.0
        self._peak = self._running

    def change(self, now: float, running: int = 0, tools: int = 0, blocked: int = 0) -> None:
        """Adds to the number of running requests, and of trajectories that wait for tools or for placement."""
        self.advance(now)
        self._running += running
        self._tools += tools
        self._blocked += blocked
        self._peak = max(self._peak, self._running)

    def advance(self, now: float) -> None:
        seconds, self._since = now - self._since, now
        under_way = self._running or self._tools
        if self._blocked or not under_way or self._running * THIN > self._peak:
            return
        if self._tools >= self._running:
            self.starved_s += seconds
        else:
            self.tail_s += seconds
