"""An HTTP server on one address, shared by the sandbox's server, the engine's gateway and the page of a run.

    async with listening(app, Address(port=8088)) as url:

Invariants
- It listens on loopback, unless there is a token that each request must carry (`incoming.authorize`). TLS is the task
  of a proxy in front.
- An address on which it cannot listen raises CannotListen: one line with the cause and what to do.
- A client that goes away cancels the handler of its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from sandbox.config import stays_here
from sandbox.http.connections import Connections, log
from sandbox.require import require, within

BACKLOG = 4096  # clients that connect at the same instant
FINISH_S = 1.0  # for answers under way when the server is told to end


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a server listens. port: 0 for any free one. token: what each request must carry, "" for none."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""

    def __post_init__(self) -> None:
        if not self.token and not stays_here(f"tcp://{self.host}:0"):
            raise ValueError(
                f"host {self.host} can be reached from other machines. Fix: give a token, or listen on 127.0.0.1"
            )
        require("port", self.port, within("[0, 65535]"))


class CannotListen(Exception):
    """The address cannot be listened on. The message is one line: the address, the cause, and what to do about it."""


@asynccontextmanager
async def listening(
    app: web.Application, address: Address, connections: Connections | None = None
) -> AsyncIterator[str]:
    """Serves an application and yields its URL, http://host:port.

    app: has the middleware `incoming.bodies_end`. connections: bounds how many clients there are and how long each may
    be silent. Raises CannotListen.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=log,
        lingering_time=0,  # `bodies_end` reads what a client still sends
        shutdown_timeout=FINISH_S,
    )
    await runner.setup()
    assert runner.server is not None
    protocols = runner.server if connections is None else connections.protocols(runner.server)
    try:
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(protocols, address.host, address.port, backlog=BACKLOG)
        except OSError as error:
            raise CannotListen(
                f"cannot listen on {address.host} port {address.port}: {error.strerror}. "
                "Fix: choose another port (0: any)"
            ) from None
        try:
            host, port = server.sockets[0].getsockname()[:2]
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        finally:
            server.close()
    finally:
        await runner.cleanup()
