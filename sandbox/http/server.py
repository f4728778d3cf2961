"""Serves the sandbox by the HTTP APIs of Code Judge and SandboxFusion, and sessions: `rocstar sandbox-http port=8088`.

GET / lists the endpoints; sessions are described in sessions.py.

Invariants
- It listens beyond loopback only with a token. Then every request must carry the token: as `Authorization: Bearer
  TOKEN`, or as the password of `http://any-name:TOKEN@host:port/...`, which clients that take just a URL can send too.
- Without a token it serves this machine's programs and no web page: see incoming.py.
- It serves when its one line of output has appeared. SIGINT and SIGTERM end it with status 0 and no process left;
  anything that keeps it from serving ends it with status 1 and one line: the cause, and what to do about it.
- A client that goes away ends the calls that it waits for.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from dataclasses import dataclass, field

import uvloop
from aiohttp import web

from sandbox.client.sandbox import Sandbox
from sandbox.config import SandboxConfig, SandboxUnavailable
from sandbox.http.code_judge import Judge
from sandbox.http.connections import Connections
from sandbox.http.gateway import LANGUAGES, MAX_WALL_S, Gateway, errors_as_json, json_response
from sandbox.http.incoming import authorized, bodies_end, hear
from sandbox.http.listener import Address, CannotListen, listening
from sandbox.http.sandbox_fusion import Fusion
from sandbox.http.sessions import Sessions
from sandbox.wire import Limits

TOKEN_VARIABLE = "ROCSTAR_SANDBOX_TOKEN"
MAX_IDLE_S = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback a token is required."""
    port: int = 8088
    """Port to listen on; 0 takes any free one, which is printed."""
    token: str = ""
    """Token that clients must send; better given as ROCSTAR_SANDBOX_TOKEN, which other users cannot see."""
    slots: int = field(default_factory=lambda: SandboxConfig().slots)
    """Programs that run at once."""
    wall_s: float = 10.0
    """Limit of time for a request that has none."""
    memory_mb: int = Limits().memory_bytes >> 20
    """The most memory of a program."""
    output_chars: int = 1000
    """How much of stdout, and of stderr, /run answers: Code Judge's MAX_STDOUT_ERROR_LENGTH."""
    session_idle_s: float = 600.0
    """A session without a cell for this long ends."""
    python: str | None = None
    """Path of the Python that runs the programs; see SandboxConfig.python."""
    nsjail: str | None = None
    """Path of the nsjail executable."""

    def __post_init__(self) -> None:
        bounds = {
            "wall_s": MAX_WALL_S,
            "memory_mb": 1 << 20,
            "output_chars": 1 << 20,
            "slots": 1000,
            "session_idle_s": MAX_IDLE_S,
        }
        for name, most in bounds.items():
            if not 0 < getattr(self, name) <= most:
                raise ValueError(f"{name} must be above 0 and at most {most:g}, got {getattr(self, name):g}")
        self.address()

    def address(self) -> Address:
        """Returns where to listen. Raises ValueError."""
        token = self.token or os.environ.get(TOKEN_VARIABLE, "").strip()  # a line read from a file ends in a newline
        return Address(host=self.host, port=self.port, token=token)

    def sandbox(self) -> SandboxConfig:
        limits = Limits(wall_s=self.wall_s, cpu_s=self.wall_s, memory_bytes=self.memory_mb << 20)
        return SandboxConfig(slots=self.slots, limits=limits, python=self.python, nsjail=self.nsjail)


def make_app(
    box: Sandbox,
    *,
    limits: Limits,
    slots: int,
    output_chars: int,
    session_idle_s: float,
    token: str,
    connections: Connections,
) -> web.Application:
    """Returns the application: both dialects, sessions, /health, /metrics, and / with a list of the endpoints."""
    gateway = Gateway(box, limits=limits, slots=slots, connections=connections)
    sessions = Sessions(gateway, idle_s=session_idle_s)

    async def health(request: web.Request) -> web.Response:
        await gateway.health()
        return json_response({"status": "ok", "level": box.stats.level})

    async def index(request: web.Request) -> web.Response:
        endpoints = [
            f"{route.method} {route.resource.canonical}"
            for route in request.app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        ]
        return json_response({"languages": LANGUAGES, "endpoints": endpoints})

    middlewares = [hear(connections), bodies_end, errors_as_json, authorized(token)]
    app = web.Application(middlewares=middlewares)
    app.cleanup_ctx.append(sessions.lifetime)
    app.add_routes(Judge(gateway, output_chars=output_chars).routes())
    app.add_routes(Fusion(gateway).routes())
    app.add_routes(sessions.routes())
    app.add_routes([web.get("/", index), web.get("/health", health), web.get("/metrics", gateway.metrics.page)])
    return app


async def serve(config: ServerConfig) -> str | None:
    """Serves until SIGINT or SIGTERM. Returns None, or what kept it from serving."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop(number: int) -> None:
        loop.remove_signal_handler(number)  # a second one ends us at once
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        async with Sandbox(config.sandbox()) as box:
            await _serve_box(box, config)
    except (SandboxUnavailable, CannotListen) as error:
        return str(error)
    except asyncio.CancelledError:  # `stop` does that
        pass
    return None


async def _serve_box(box: Sandbox, config: ServerConfig) -> None:
    """Serves until it is cancelled."""
    connections, address = Connections.within_limits(), config.address()
    app = make_app(
        box,
        limits=config.sandbox().limits,
        slots=config.slots,
        output_chars=config.output_chars,
        session_idle_s=config.session_idle_s,
        token=address.token,
        connections=connections,
    )
    async with listening(app, address, connections) as url:
        print(f"sandbox at {url}, isolation {box.stats.level}, {config.slots} slots", flush=True)
        await asyncio.Event().wait()


def run(config: ServerConfig) -> str | None:
    """Serves as this process until SIGINT or SIGTERM. Returns None, or what kept it from serving."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection takes one; the usual 1024 are too few
    return uvloop.run(serve(config))
