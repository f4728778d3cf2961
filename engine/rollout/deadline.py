"""The wall time of a trajectory.

Invariant: its waits for a place on a replica do not count; everything else does, over all its attempts together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class TrajectoryDeadline:
    """Bounds all attempts: `async with deadline.timeout() as budget` around each, `with deadline.paused()` inside."""

    def __init__(self, seconds: float) -> None:
        self._now = asyncio.get_running_loop().time
        self._ends_at = self._now() + seconds
        self._waits = 0
        self._since = 0.0

    def timeout(self) -> asyncio.Timeout:
        self._timeout = asyncio.timeout_at(self._ends_at)
        return self._timeout

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock. Overlapping pauses count once, from the beginning of the first to the end of the last."""
        if not self._waits and self._now() >= self._ends_at:  # the deadline has passed, and a pause must not revoke it
            yield
            return
        if not self._waits:
            self._since = self._now()
            self._reschedule(None)
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            if not self._waits:
                self._ends_at += self._now() - self._since
                self._reschedule(self._ends_at)

    def _reschedule(self, when: float | None) -> None:
        with suppress(RuntimeError):  # the attempt has ended or is being cancelled
            self._timeout.reschedule(when)
