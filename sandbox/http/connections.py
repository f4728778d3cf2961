"""The server's connections: how many there are, how long each may wait for its client, and what of them is logged.

Invariants
- A connection that waits for its client is closed after PATIENCE_S: for the headers of a first or a next request, or
  for its answer to be taken, if the client has taken nothing of it. A body has a deadline of its own.
- At most `most` are open, so that descriptors never run out. One more ends the connection that has waited longest for
  its client; if all are at work, it is closed itself.
- Each kind of event that a client causes makes at most one line in the log in LOG_S.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from sandbox.printable import printable

PATIENCE_S = 75.0  # above BODY_S, whose end is answered, and above the time for which clients keep unused connections
LOG_S = 10.0
SPARE_FDS = 128  # for all that is not a connection


class Seldom(logging.Filter):
    """Lets one record of a kind through in LOG_S, with the number of those left out.

    It drops the traceback of a fault that is the client's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged_at: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = str(record.msg)
        if record.created - self._logged_at.get(kind, 0.0) < LOG_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        self._logged_at[kind] = record.created
        line = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and type(error).__module__.startswith("aiohttp"):
            line += f": {str(error).splitlines()[0][:200] if str(error) else type(error).__name__}"
            record.exc_info = None
        if left_out := self._left_out.pop(kind, 0):
            line += f" ({left_out} more of these since the last line)"
        record.msg, record.args = printable(line), None
        return True


log = logging.getLogger(__name__)
log.addFilter(Seldom())


class Connection(asyncio.Protocol):
    """Passes events of the transport on to aiohttp's protocol."""

    def __init__(self, inner: asyncio.Protocol, home: Connections) -> None:
        self._inner = inner
        self._home = home

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._inner.connection_made(transport)
        self._home.opened(self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._home.closed(self._transport)
        self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class Connections:
    """All connections of a server.

    >>> connections = Connections.within_limits()
    >>> await loop.create_server(connections.protocols(runner.server), host, port)
    """

    def __init__(self, *, most: int, patience_s: float = PATIENCE_S) -> None:
        self._most = most
        self._patience_s = patience_s
        self._open: set[asyncio.Transport] = set()
        # Connections that wait for their client, the longest first: since when, and how much was to be sent.
        self._waiting: dict[asyncio.Transport, tuple[float, int]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def within_limits(cls) -> Connections:
        """Allows as many as this process may have descriptors, less some for everything else."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(most=max(descriptors - SPARE_FDS, descriptors // 2))

    @property
    def count(self) -> int:
        return len(self._open)

    def protocols(self, inner: Callable[[], asyncio.Protocol]) -> Callable[[], Connection]:
        """Returns the factory with which a server makes a protocol for each connection."""
        return lambda: Connection(inner(), self)

    def opened(self, transport: asyncio.Transport) -> None:
        if len(self._open) >= self._most:
            log.warning(
                "%d connections are open, as many as there can be: each new one ends the one that has been "
                "silent longest. Fix: raise `ulimit -n`, or look for a client that leaves its connections open",
                self._most,
            )
            longest = next(iter(self._waiting), transport)
            self._abort(longest)
            if longest is transport:
                return
        self._open.add(transport)
        self._wait_for_client(transport)

    def closed(self, transport: asyncio.Transport) -> None:
        self._open.discard(transport)
        self._waiting.pop(transport, None)

    def heard(self, transport: asyncio.Transport | None) -> None:
        """Notes that a request, or a part of one, has come: the wait for its client begins anew."""
        if transport is not None and transport in self._waiting:
            self._wait_for_client(transport)

    @contextmanager
    def at_work(self, transport: asyncio.Transport | None) -> Iterator[None]:
        """Marks that inside it is not the client that is waited for."""
        if transport is None or transport not in self._waiting:
            yield
            return
        del self._waiting[transport]
        try:
            yield
        finally:
            if transport in self._open:
                self._wait_for_client(transport)

    def _wait_for_client(self, transport: asyncio.Transport) -> None:
        self._waiting.pop(transport, None)
        loop = asyncio.get_running_loop()
        self._waiting[transport] = loop.time(), transport.get_write_buffer_size()
        if self._timer is None:
            self._timer = loop.call_later(self._patience_s, self._look)

    def _look(self) -> None:
        """Closes the connections that have waited too long; comes back for the next one."""
        self._timer = None
        loop = asyncio.get_running_loop()
        while self._waiting:
            transport, (since, before) = next(iter(self._waiting.items()))
            if since + self._patience_s > loop.time():
                self._timer = loop.call_at(since + self._patience_s, self._look)
                return
            if transport.get_write_buffer_size() not in (0, before):  # its answer is on its way
                self._wait_for_client(transport)
            else:
                self._abort(transport)

    def _abort(self, transport: asyncio.Transport) -> None:
        self._open.discard(transport)
        self._waiting.pop(transport, None)
        transport.abort()
