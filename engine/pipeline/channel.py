"""A bounded, closable channel between stages of a pipeline.

Invariants
- At most `capacity` items wait; a full channel blocks its producers, an empty one its consumers.
- After `close()` the waiting items are still delivered, then every consumer's iteration ends; a put raises
  `ChannelClosed`.
- Cancelling a consumer never loses an item.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from sandbox.require import at_least, require

T = TypeVar("T")


class ChannelClosed(Exception):
    """The channel is closed: nothing may be put into it, or nothing is left to come out."""


class Channel(Generic[T]):
    """First in, first out.

    >>> async def double(inbox, outbox):
    ...     async for number in inbox:
    ...         await outbox.put(2 * number)
    """

    def __init__(self, capacity: int, name: str = "channel") -> None:
        require(f"channel {name}: capacity", capacity, at_least(1))
        self.name = name
        self.capacity = capacity
        self.closed = False
        self._items: deque[T] = deque()
        self._getters: deque[asyncio.Future[None]] = deque()
        self._putters: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: T) -> None:
        """Waits for room. Raises ChannelClosed."""
        while len(self._items) >= self.capacity and not self.closed:
            await self._wait(self._putters)
        if self.closed:
            self._wake(self._putters)
            raise ChannelClosed(self.name)
        self._items.append(item)
        self._wake(self._getters)

    async def get(self) -> T:
        """Waits for an item. Raises ChannelClosed once the channel is closed and drained."""
        while not self._items and not self.closed:
            await self._wait(self._getters)
        if not self._items:
            self._wake(self._getters)
            raise ChannelClosed(self.name)
        item = self._items.popleft()
        self._wake(self._putters)
        return item

    def close(self) -> None:
        self.closed = True
        self._wake(self._getters)
        self._wake(self._putters)

    def clear(self) -> None:
        """Discards the waiting items."""
        self._items.clear()
        self._wake(self._putters)

    async def __aiter__(self) -> AsyncIterator[T]:
        while True:
            try:
                item = await self.get()
            except ChannelClosed:
                return
            yield item

    async def _wait(self, waiters: deque[asyncio.Future[None]]) -> None:
        future = asyncio.get_running_loop().create_future()
        waiters.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._wake(waiters)  # this waiter does not use its wake-up, so the next one gets it
            elif future in waiters:  # a wake-up in this tick may have removed it already
                waiters.remove(future)
            raise

    @staticmethod
    def _wake(waiters: deque[asyncio.Future[None]]) -> None:
        while waiters:
            future = waiters.popleft()
            if not future.done():
                future.set_result(None)
                return
