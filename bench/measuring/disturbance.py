"""Tells whether somebody else used the machine while a bench ran: then its ratios say nothing."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Self

import psutil

from bench.measuring.processes import family

MOST = 0.10  # share of the machine's CPU that others may use
ROUNDS = 3  # below which a ratio has no spread

PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")

Seconds = dict[int, tuple[float, float]]  # pid -> its own CPU, and that of children for which it has waited


class Surroundings:
    """Watches the machine's CPU while it is open.

    Meanwhile this process adopts the orphans among its descendants, such as the engine of a server that ended first:
    process 1 would, and then their CPU would be that of others.
    """

    def __enter__(self) -> Self:
        _adopt_orphans(True)
        self._began = time.monotonic()
        self._before, self._machine_s = _others(), _beyond_family_s()
        return self

    def __exit__(self, *_: object) -> None:
        _adopt_orphans(False)

    def others(self) -> float:
        """Returns the share of all cores that other processes have used, from 0 to 1.

        In a container the processes of the rest of the machine cannot be seen. Then it is what the machine used more
        than this process and its descendants, which counts too much: the times of a child are lost if its parent
        ignores SIGCHLD, as jails do.
        """
        used_s = used(self._before, _others()) if _sees_all() else _beyond_family_s() - self._machine_s
        seconds = max(1e-9, time.monotonic() - self._began)
        return max(0.0, used_s / seconds / (os.cpu_count() or 1))


def used(before: Seconds, now: Seconds) -> float:
    """Returns the CPU seconds that processes used between two moments, also those that ended meanwhile.

    >>> used({1: (5.0, 0.0), 2: (3.0, 0.0)}, {1: (5.0, 3.5), 3: (1.0, 0.0)})  # 2 used 0.5 more and ended, 3 is new
    1.5
    """
    own = sum(own - before.get(pid, (0.0, 0.0))[0] for pid, (own, _) in now.items())
    waited = sum(children - before.get(pid, (0.0, 0.0))[1] for pid, (_, children) in now.items())
    ended = sum(sum(seconds) for pid, seconds in before.items() if pid not in now)
    return own + max(0.0, waited - ended)


def reason(others: float, rounds: int) -> str | None:
    """Returns why no ratio of a run is to be shown; None: they are good.

    >>> reason(0.02, 5) is None
    True
    >>> reason(0.34, 5)
    'other processes used 34 % of the CPU'
    """
    if others > MOST:
        return f"other processes used {100 * others:.0f} % of the CPU"
    if rounds < ROUNDS:
        return f"{rounds} of the {ROUNDS} rounds that show a spread"
    return None


def _adopt_orphans(yes: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, yes)


def _others() -> Seconds:
    """Returns the CPU of all processes but this one and its descendants."""
    own = {process.pid for process in family(os.getpid())}
    return {process.pid: _seconds(process) for process in psutil.process_iter() if process.pid not in own}


def _seconds(process: psutil.Process) -> tuple[float, float]:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has just ended
        return 0.0, 0.0
    return times.user + times.system, times.children_user + times.children_system


def _sees_all() -> bool:
    """Returns whether this is the machine's first PID namespace, where process 2 is the kernel's."""
    try:
        return Path("/proc/2/comm").read_text() == "kthreadd\n"
    except OSError:
        return False


def _beyond_family_s() -> float:
    """Returns the CPU seconds of the machine less those of this process and its descendants, up to a constant."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    machine_s = (user + nice + system + irq + softirq) / _TICKS
    return machine_s - sum(sum(_seconds(process)) for process in family(os.getpid()))
