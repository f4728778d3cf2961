"""The clock of a run: seconds since 1970 (UTC), for all that a run writes down.

Invariants
- It never goes back, and a step of the wall clock moves nothing: the time of day is looked up once, at import.
- Clocks of several processes and machines share one axis, as far as their times of day agree.
- It tells quarters of a microsecond apart.
"""

from __future__ import annotations

import time

_ZERO = time.time() - time.perf_counter()


def now() -> float:
    return _ZERO + time.perf_counter()
