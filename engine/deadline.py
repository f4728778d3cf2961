"""The wall time of a trajectory.

Invariant: what it waits for a place on a replica does not count; everything else does, over all its attempts together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class Deadline:
    """`async with deadline.timeout() as budget` for one attempt after another, and `with deadline.waiting()` inside.

    Each turn waits, most for a moment: the timer stays as it is, and looks how much was waited when it fires.
    """

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._ends_at = self._loop.time() + seconds
        self._since: float | None = None  # when the wait began that goes on
        self._timer: asyncio.TimerHandle | None = None  # None: it fired while that wait went on

    @asynccontextmanager
    async def timeout(self) -> AsyncIterator[asyncio.Timeout]:
        async with asyncio.timeout(None) as self._timeout:
            self._look()
            try:
                yield self._timeout
            finally:
                if self._timer is not None:
                    self._timer.cancel()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._since = self._loop.time()
        try:
            yield
        finally:
            self._ends_at += self._loop.time() - self._since
            self._since = None
        if self._timer is None:
            self._look()

    def _look(self) -> None:
        """The end if it has come; else a timer, unless a wait goes on, which looks when it is over."""
        self._timer = None
        if self._timeout.expired():
            return
        now = self._loop.time()
        if self._ends_at <= (now if self._since is None else self._since):
            self._timeout.reschedule(now)
        elif self._since is None:
            self._timer = self._loop.call_at(self._ends_at, self._look)
