"""How full the replicas are, all together. Pure: counts and the time go in, seconds of near-emptiness come out.

The idle clock counts a replica as busy while one request runs there. A run may lose its time in such hours: of 256
trajectories three are left, or 250 wait for tools. Both are counted here.
"""

from __future__ import annotations

THIN = 8  # running requests are few when they are at most this part of the most that ran at once


class Occupancy:
    """Seconds since `begin` in which few requests ran while no trajectory waited for a place, by what was missing.

    starved_s: as many trajectories waited for tools as ran, or more. tail_s: nearly all had ended.

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
        self._peak = 0  # of running, since the step began
        self._since = 0.0

    def begin(self, now: float) -> None:
        """A step begins: what is under way goes on."""
        self.advance(now)
        self.starved_s = self.tail_s = 0.0
        self._peak = self._running

    def change(self, now: float, running: int = 0, tools: int = 0, blocked: int = 0) -> None:
        """Counts so many more requests that run, and trajectories that wait for tools or for a place."""
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
