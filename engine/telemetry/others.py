"""Measures how much of the machine's CPU processes of others use while a run goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

LEAST_S = 5.0  # between two looks, each of which visits all processes of the machine
COST = 0.005  # the share of a core that looking may take
CGROUP = Path("/sys/fs/cgroup/cpu.stat")
_TICKS = os.sysconf("SC_CLK_TCK")

Seconds = dict[int, tuple[float, float]]  # pid -> its own CPU, and that of children for which it has waited


def used(before: Seconds, now: Seconds) -> float:
    """Returns the CPU seconds that processes used between two moments, also those that ended meanwhile.

    >>> used({1: (5.0, 0.0), 2: (3.0, 0.0)}, {1: (5.0, 3.5), 3: (1.0, 0.0)})  # 2 used 0.5 more and ended, 3 is new
    1.5
    """
    own = sum(own - before.get(pid, (0.0, 0.0))[0] for pid, (own, _) in now.items())
    waited = sum(children - before.get(pid, (0.0, 0.0))[1] for pid, (_, children) in now.items())
    ended = sum(sum(seconds) for pid, seconds in before.items() if pid not in now)
    return own + max(0.0, waited - ended)


def family(pid: int) -> list[psutil.Process]:
    """Returns a process and all below it; nothing if it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def seconds_of(process: psutil.Process) -> tuple[float, float]:
    """Returns the CPU seconds of a process, and of the children for which it has waited; 0 if it has just ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0, 0.0
    return times.user + times.system, times.children_user + times.children_system


def beyond_family() -> Seconds:
    """Returns the CPU of all processes but this one and those below it."""
    own = {process.pid for process in family(os.getpid())}
    return {process.pid: seconds_of(process) for process in psutil.process_iter() if process.pid not in own}


def sees_all() -> bool:
    """Returns whether this is the machine's first PID namespace, where process 2 is the kernel's."""
    try:
        return Path("/proc/2/comm").read_text() == "kthreadd\n"
    except OSError:
        return False


def machine_s() -> float:
    """Returns the seconds for which the machine's cores were in use, up to a constant."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / _TICKS


class OthersMeter:
    """Measures the share of the machine's cores that others use, between one `look` and the next.

    In a container whose CPU the kernel counts, all in it belongs to the run. Otherwise all below this process does. In
    a container whose CPU is not counted, nothing is measured.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._look: Callable[[], float] | None = None
        if sees_all():
            self._before = beyond_family()
            self._look = self._of_processes
        elif _container_s() is not None:
            self._beyond_s = machine_s() - (_container_s() or 0.0)
            self._look = self._beyond_container
        self._since = clock()
        self.pause_s = LEAST_S
        """Seconds until the next look: the more processes there are, the longer."""

    def share(self) -> float | None:
        """Returns the share since the last call, from 0 to 1; None where it cannot be measured. Takes milliseconds."""
        if self._look is None:
            return None
        began = self._clock()
        seconds = self._look()
        now = self._clock()
        self.pause_s = max(LEAST_S, (now - began) / COST)
        passed_s, self._since = max(1e-9, now - self._since), now
        return min(1.0, max(0.0, seconds / passed_s / (os.cpu_count() or 1)))

    def _of_processes(self) -> float:
        before, self._before = self._before, beyond_family()
        return used(before, self._before)

    def _beyond_container(self) -> float:
        before, self._beyond_s = self._beyond_s, machine_s() - (_container_s() or 0.0)
        return self._beyond_s - before


def _container_s() -> float | None:
    """Returns the CPU seconds of this container so far; None if the kernel does not count them."""
    with suppress(OSError, ValueError, IndexError):
        return int(CGROUP.read_text().split()[1]) / 1e6
    return None
