"""The wall time of a trajectory.

Invariant: what it waits for a place on a replica does not count; everything else does, over all its attempts together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class TrajectoryDeadline:
    """`async with deadline.timeout() as budget` for one attempt after another, and `with deadline.paused()` inside."""

    def __init__(self, seconds: float) -> None:
        self._now = asyncio.get_running_loop().time
        self._ends_at = self._now() + seconds

    def timeout(self) -> asyncio.Timeout:
        self._timeout = asyncio.timeout_at(self._ends_at)
        return self._timeout

    @contextmanager
    def paused(self) -> Iterator[None]:
        since = self._now()
        if since >= self._ends_at or self._timeout.expired():  # the end is on its way, and nothing holds it up
            yield
            return
        self._timeout.reschedule(None)
        try:
            yield
        finally:
            self._ends_at += self._now() - since
        self._timeout.reschedule(self._ends_at)
