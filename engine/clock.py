"""The clock of a run, in seconds since 1970 (UTC): every time that a run writes down comes from it.

Invariants
- It never goes back, even if the wall clock is set: the time of day is read once, at import.
- The clocks of several processes and machines agree as far as their times of day do.
- Its resolution is a quarter of a microsecond.
"""

from __future__ import annotations

import time

_ZERO = time.time() - time.perf_counter()


def now() -> float:
    return _ZERO + time.perf_counter()
