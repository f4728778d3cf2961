"""Tells whether somebody else used the machine while a bench ran: then its ratios say nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

from bench.measuring.processes import family

MOST = 0.10  # share of the machine's CPU that others may use
ROUNDS = 3  # below which a ratio has no spread

_TICKS = os.sysconf("SC_CLK_TCK")


class Surroundings:
    """Watches the machine's CPU from its construction on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._all_s, self._own_s = _busy_s(), _own_s()

    def others(self) -> float:
        """Returns the share of all cores that other processes have used, from 0 to 1."""
        seconds = max(1e-9, time.monotonic() - self._began)
        used_s = (_busy_s() - self._all_s) - (_own_s() - self._own_s)
        return max(0.0, used_s / seconds / (os.cpu_count() or 1))


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


def _busy_s() -> float:
    """Returns the CPU seconds of all processes since the machine started."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / _TICKS


def _own_s() -> float:
    """Returns the CPU seconds of this process and its descendants, those that have ended included."""
    own = os.times()
    seconds = own.user + own.system + own.children_user + own.children_system
    for process in family(os.getpid())[1:]:
        try:
            times = process.cpu_times()
        except Exception:
            continue
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds
