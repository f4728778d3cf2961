"""Measures what the node's own process costs a run: how long its event loop was blocked, and the CPU that it takes.

Invariant: measuring costs one wake-up of the loop every TICK_S, one of a thread every LOOK_S, and a look at all
processes of the machine every LEAST_S or more, which another thread takes (`engine.telemetry.others`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import psutil

from engine import metric_names as metric
from engine.telemetry.others import OthersMeter
from engine.telemetry.stall_watch import StallWatch

TICK_S = 0.05
NOTABLE_S = 0.1  # a line that blocked the loop for less than this in a step is not reported
STALL_S = 0.02  # a tick that is later than this counts as a blocked loop; less is the noise of busy cores


class HostMeter:
    """Measures while `run` runs as a task; `read` returns a step's figures. say, end, silence_s: see `StallWatch`."""

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
        self._due = math.inf  # time of the next tick
        self._watch: StallWatch | None = None
        self._others: list[float] = []  # shares since the last `read`
        self._since = time.perf_counter()
        self._cpu_s = time.thread_time()
        psutil.cpu_percent()  # the next call measures since this one

    async def run(self) -> None:
        """Measures until it is cancelled."""
        watch = StallWatch(
            lambda: time.perf_counter() - self._due - STALL_S, say=self._say, end=self._end, silence_s=self._silence_s
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_others(), name="others")
            with watch as self._watch:
                while True:
                    before = time.perf_counter()
                    self._due = before + TICK_S
                    await asyncio.sleep(TICK_S)
                    self.late(time.perf_counter() - before - TICK_S)

    async def _watch_others(self) -> None:
        """Looks what others use, and says so if that cannot be measured."""
        try:
            meter = await asyncio.to_thread(OthersMeter)
            while True:
                await asyncio.sleep(meter.pause_s)
                share = await asyncio.to_thread(meter.share)
                if share is None:
                    return
                self._others.append(share)
        except (OSError, ValueError, psutil.Error) as error:
            self._say(f"what other processes use of the machine is not measured any more: {error}")

    @property
    def blocked_at(self) -> dict[str, float]:
        """Seconds for which the loop was blocked since the run began, for the ten lines that blocked it longest."""
        seconds = dict(self._watch.seconds) if self._watch is not None else {}
        return dict(sorted(seconds.items(), key=lambda item: -item[1])[:10])

    def late(self, seconds: float) -> None:
        """Counts a tick that the loop served so many seconds late."""
        if seconds > STALL_S:
            self._blocked_s += seconds
            self._longest_s = max(self._longest_s, seconds)

    def read(self) -> dict[str, float]:
        """Returns the metrics since the last call; must be called in the loop's own thread.

        loop_cpu_share: share of one core that this thread used. machine_cpu_share: share of all cores that were busy.
        others_cpu_share: share of all cores that others used, where a look fell into the time.
        blocked_at/LINE: seconds at the line that blocked the loop longest.
        """
        now, cpu_s = time.perf_counter(), time.thread_time()
        metrics = {
            metric.HOST_LOOP_BLOCKED_S: self._blocked_s,
            metric.HOST_LOOP_LAG_MAX_MS: self._longest_s * 1e3,
            metric.HOST_LOOP_CPU_SHARE: (cpu_s - self._cpu_s) / max(1e-9, now - self._since),
            metric.HOST_MACHINE_CPU_SHARE: psutil.cpu_percent() / 100,
        }
        if self._others:
            metrics[metric.HOST_OTHERS_CPU_SHARE] = sum(self._others) / len(self._others)
            self._others.clear()
        self._blocked_s = self._longest_s = 0.0
        self._since, self._cpu_s = now, cpu_s
        return metrics | self._worst_line()

    def _worst_line(self) -> dict[str, float]:
        """Returns the seconds of the line that blocked the loop longest since the last call, if they are notable."""
        total = dict(self._watch.seconds) if self._watch is not None else {}
        recent = {line: seconds - self._blocked_before.get(line, 0.0) for line, seconds in total.items()}
        self._blocked_before = total
        worst = max(recent, key=lambda line: recent[line], default="")
        if not worst or recent[worst] < NOTABLE_S:
            return {}
        return {metric.member(metric.HOST_BLOCKED_AT, worst): recent[worst]}
