"""Tells whether somebody else used the machine while a bench ran: then its ratios say nothing."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Self

from engine.telemetry.others import beyond_family, family, machine_s, seconds_of, sees_all, used

MOST = 0.10  # share of the machine's CPU that others may use
ROUNDS = 3  # below which a ratio has no spread

PR_SET_CHILD_SUBREAPER = 36


class Surroundings:
    """Watches the machine's CPU while it is open.

    Meanwhile this process adopts the orphans among its descendants, such as the engine of a server that ended first:
    process 1 would, and then their CPU would be that of others.
    """

    def __enter__(self) -> Self:
        _adopt_orphans(True)
        self._began = time.monotonic()
        self._before, self._machine_s = beyond_family(), _beyond_family_s()
        return self

    def __exit__(self, *_: object) -> None:
        _adopt_orphans(False)

    def others(self) -> float:
        """Returns the share of all cores that other processes have used, from 0 to 1.

        In a container the processes of the rest of the machine cannot be seen. Then it is what the machine used more
        than this process and its descendants, which counts too much: the times of a child are lost if its parent
        ignores SIGCHLD, as jails do.
        """
        used_s = used(self._before, beyond_family()) if sees_all() else _beyond_family_s() - self._machine_s
        seconds = max(1e-9, time.monotonic() - self._began)
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


def _adopt_orphans(yes: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, yes)


def _beyond_family_s() -> float:
    """Returns the CPU seconds of the machine less those of this process and its descendants, up to a constant."""
    return machine_s() - sum(sum(seconds_of(process)) for process in family(os.getpid()))
