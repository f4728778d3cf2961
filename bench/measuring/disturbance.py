"""Tells whether somebody else used the machine while a bench ran: then its ratios say nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from bench.measuring.processes import family

MOST = 0.10  # share of the machine's CPU that others may use
ROUNDS = 3  # below which a ratio has no spread

_TICKS = os.sysconf("SC_CLK_TCK")


class Surroundings:
    """Watches the machine's CPU from its construction on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._others_s = _others_s()

    def others(self) -> float:
        """Returns the share of all cores that other processes have used, from 0 to 1."""
        seconds = max(1e-9, time.monotonic() - self._began)
        return max(0.0, (_others_s() - self._others_s) / seconds / (os.cpu_count() or 1))


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


def _others_s() -> float:
    """Returns the CPU seconds so far of all processes but this one and its descendants, up to a constant.

    In a container the processes of the rest of the machine cannot be seen. Then it is what the machine used more than
    this family, which counts too much: times of a child are lost if its parent ignores SIGCHLD, as jails do.
    """
    if not _sees_all():
        return _machine_s() - sum(map(_seconds, family(os.getpid())))
    own = {process.pid for process in family(os.getpid())}
    return sum(_seconds(process) for process in psutil.process_iter() if process.pid not in own)


def _sees_all() -> bool:
    """Whether this is the machine's first PID namespace, where process 2 is the kernel's."""
    try:
        return Path("/proc/2/comm").read_text() == "kthreadd\n"
    except OSError:
        return False


def _machine_s() -> float:
    """Returns the CPU seconds of all processes since the machine started."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / _TICKS


def _seconds(process: psutil.Process) -> float:
    """Returns the CPU seconds of a process and of the children for which it has waited; 0 if it has just ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    seconds: float = times.user + times.system + times.children_user + times.children_system
    return seconds
