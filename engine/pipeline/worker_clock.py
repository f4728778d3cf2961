"""Measures when the workers of a stage work, and when they wait for their channels.

Invariants
- For each worker: busy + blocked on input + blocked on output = the time since it started. A worker that is blocked on
  both at once is blocked on input.
- The periods of a stage are its times with at least one busy worker. They do not overlap. Pauses shorter than JOINED_S
  are counted in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

PERIODS = 50_000  # the most that are kept until somebody drains them
JOINED_S = 0.001


class Period(NamedTuple):
    """A period in which a stage worked. place: of the stage in the pipeline. start, end: by the run's clock."""

    stage: str
    place: int
    start: float
    end: float


class Periods:
    """Collects the periods of one stage into `collected` from the number of its busy workers.

    works: is called with True when the stage begins to work, and with False when it waits.
    """

    def __init__(
        self, stage: str, place: int, collected: deque[Period], works: Callable[[bool], None] = lambda does: None
    ) -> None:
        self._stage, self._place, self._collected, self._works = stage, place, collected, works
        self._busy = 0
        self._start = 0.0
        self._end: float | None = None  # of a period that goes on if the stage works again soon

    def change(self, workers: int, now: float) -> None:
        """Notes that so many workers more are busy, fewer if negative."""
        if not self._busy:
            if self._end is None or now - self._end >= JOINED_S:
                self._collect(self._end)
                self._start = now
            self._end = None
            self._works(True)
        self._busy += workers
        if not self._busy:
            self._end = now
            self._works(False)

    def cut(self, now: float) -> None:
        """Collects what has passed of the period; what follows is another one."""
        self._collect(now if self._busy else self._end)
        self._start, self._end = now, None

    def _collect(self, end: float | None) -> None:
        if end is not None and end > self._start:
            self._collected.append(Period(self._stage, self._place, self._start, end))


class WorkerClock:
    """Counts the seconds of one worker, which starts busy."""

    def __init__(self, now: Callable[[], float], periods: Periods) -> None:
        self._now, self._periods = now, periods
        self._waits = {"in": 0, "out": 0}  # how many of the worker's tasks wait
        self._seconds = {"busy": 0.0, "in": 0.0, "out": 0.0}
        self._state: Literal["busy", "in", "out", "ended"] = "busy"
        self._since = now()
        periods.change(1, self._since)

    def waits_for_input(self, tasks: int) -> None:
        """Notes that so many tasks more wait for an item, fewer if negative."""
        self._count("in", tasks)

    def waits_for_room(self, tasks: int) -> None:
        """Notes that so many tasks more wait for room, fewer if negative."""
        self._count("out", tasks)

    def end(self) -> None:
        self._go("ended")

    def seconds(self) -> dict[str, float]:
        """Returns the seconds so far that the worker was "busy", blocked on input ("in") and on output ("out")."""
        so_far = dict(self._seconds)
        if self._state != "ended":
            so_far[self._state] += self._now() - self._since
        return so_far

    def _count(self, side: Literal["in", "out"], tasks: int) -> None:
        self._waits[side] += tasks
        if self._state != "ended":
            self._go("in" if self._waits["in"] else "out" if self._waits["out"] else "busy")

    def _go(self, state: Literal["busy", "in", "out", "ended"]) -> None:
        before, now = self._state, self._now()
        if before == state or before == "ended":
            return
        self._seconds[before] += now - self._since
        self._state, self._since = state, now
        if "busy" in (before, state):
            self._periods.change(1 if state == "busy" else -1, now)
