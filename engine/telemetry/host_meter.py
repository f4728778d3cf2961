"""What the node's own process costs a run: how long its event loop stood still, and the CPU that it takes.

Invariant: measuring costs one wake-up of the loop every TICK_S, and one of a thread every LOOK_S.
"""

from __future__ import annotations

import asyncio
import math
import time

import psutil

from engine.telemetry.stall_watch import StallWatch

TICK_S = 0.05
STALL_S = 0.02  # a tick that comes later than this found the loop held up; less is the noise of busy cores


class HostMeter:
    """`run` as a task, `read` at each end of a step."""

    def __init__(self) -> None:
        self._blocked_s = 0.0
        self._longest_s = 0.0
        self._due = math.inf  # the next tick
        self._watch: StallWatch | None = None
        self._since = time.perf_counter()
        self._cpu_s = time.thread_time()
        psutil.cpu_percent()  # of the machine: since it was last asked

    async def run(self) -> None:
        """Until cancelled."""
        with StallWatch(lambda: time.perf_counter() - self._due - STALL_S) as self._watch:
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
        machine_cpu_share: of all cores, by everybody.
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
        return found
