"""What the node's own process costs a run: how long its event loop stood still, and the CPU that it takes.

Invariant: measuring costs one wake-up of the loop every TICK_S, and one of a thread every LOOK_S.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import psutil

from engine.telemetry.stall_watch import StallWatch

TICK_S = 0.05
NOTABLE_S = 0.1  # of a step, at one line
STALL_S = 0.02  # a tick that comes later than this found the loop held up; less is the noise of busy cores


class HostMeter:
    """`run` as a task, `read` at each end of a step. say, end, silence_s: as of `StallWatch`."""

    def __init__(
        self,
        *,
        say: Callable[[str], None] = lambda line: None,
        end: Callable[[], None] = lambda: None,
        silence_s: float = math.inf,
    ) -> None:
        self._say, self._end, self._silence_s = say, end, silence_s
        self._blocked_before: dict[str, float] = {}
        self._blocked_s = 0.0
        self._longest_s = 0.0
        self._due = math.inf  # the next tick
        self._watch: StallWatch | None = None
        self._since = time.perf_counter()
        self._cpu_s = time.thread_time()
        psutil.cpu_percent()  # of the machine: since it was last asked

    async def run(self) -> None:
        """Until cancelled."""
        watch = StallWatch(
            lambda: time.perf_counter() - self._due - STALL_S, say=self._say, end=self._end, silence_s=self._silence_s
        )
        with watch as self._watch:
            while True:
                before = time.perf_counter()
                self._due = before + TICK_S
                await asyncio.sleep(TICK_S)
                self.late(time.perf_counter() - before - TICK_S)

    @property
    def blocked_at(self) -> dict[str, float]:
        """Seconds for which the loop stood still, by line, since the run began; the ten that are most."""
        found = dict(self._watch.seconds) if self._watch is not None else {}
        return dict(sorted(found.items(), key=lambda item: -item[1])[:10])

    def late(self, seconds: float) -> None:
        """The loop served a tick so much too late."""
        if seconds > STALL_S:
            self._blocked_s += seconds
            self._longest_s = max(self._longest_s, seconds)

    def read(self) -> dict[str, float]:
        """Metrics since the last call, made in the loop's own thread. loop_cpu_share: of one core, by that thread;
        machine_cpu_share: of all cores, by everybody. blocked_at/PLACE: seconds at the line where it stood longest.
        """
        now, cpu_s = time.perf_counter(), time.thread_time()
        found = {
            "host/loop_blocked_s": self._blocked_s,
            "host/loop_lag_max_ms": self._longest_s * 1e3,
            "host/loop_cpu_share": (cpu_s - self._cpu_s) / max(1e-9, now - self._since),
            "host/machine_cpu_share": psutil.cpu_percent() / 100,
        }
        self._blocked_s = self._longest_s = 0.0
        self._since, self._cpu_s = now, cpu_s
        return found | self._worst_place()

    def _worst_place(self) -> dict[str, float]:
        """Where the loop stood longest since the last call, if it was long."""
        so_far = dict(self._watch.seconds) if self._watch is not None else {}
        passed = {place: seconds - self._blocked_before.get(place, 0.0) for place, seconds in so_far.items()}
        self._blocked_before = so_far
        place = max(passed, key=lambda place: passed[place], default="")
        return {f"host/blocked_at/{place}": passed[place]} if place and passed[place] >= NOTABLE_S else {}
