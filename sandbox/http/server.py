"""`python -m sandbox.http --port 8088`: the sandbox behind the HTTP APIs of Code Judge and SandboxFusion, and sessions.

GET / lists what can be asked; sessions are described in sessions.py.

Invariants
- It listens beyond loopback only with a token, and with a token every request must carry it: as `Authorization: Bearer
  TOKEN`, or as the password of `http://any-name:TOKEN@host:port/...`, which clients that take just a URL can send too.
- Without a token it serves this machine's programs and no web page: see incoming.py.
- It serves when its one line of output has appeared. SIGINT and SIGTERM end it with status 0 and no process left; what
  keeps it from serving ends it with status 1 and one line: the cause, and what to do about it.
- A client that goes away ends the calls it waits for.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import sys

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
from sandbox.printable import print_logs
from sandbox.wire import Limits

TOKEN_VARIABLE = "ROCSTAR_SANDBOX_TOKEN"
MAX_IDLE_S = 86_400.0


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
    """The routes of both dialects and of sessions, /health, /metrics, and / with a list of them all."""
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


async def serve(options: argparse.Namespace) -> str | None:
    """Serve until SIGINT or SIGTERM; return None, or what kept it from serving."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop(number: int) -> None:
        loop.remove_signal_handler(number)  # the second one ends us at once
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        async with Sandbox(options.config) as box:
            await _serve_box(box, options)
    except (SandboxUnavailable, CannotListen) as error:
        return str(error)
    except asyncio.CancelledError:  # by `stop`
        pass
    return None


async def _serve_box(box: Sandbox, options: argparse.Namespace) -> None:
    """Serve until cancelled."""
    config: SandboxConfig = options.config
    connections = Connections.within_limits()
    app = make_app(
        box,
        limits=config.limits,
        slots=config.slots,
        output_chars=options.output_chars,
        session_idle_s=options.session_idle_s,
        token=options.address.token,
        connections=connections,
    )
    async with listening(app, options.address, connections) as url:
        print(f"sandbox at {url}, isolation {box.stats.level}, {config.slots} slots", flush=True)
        await asyncio.Event().wait()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, with `config` made of them. SystemExit for wrong ones."""
    limits, slots = Limits(), SandboxConfig().slots
    parser = argparse.ArgumentParser(prog="python -m sandbox.http", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; beyond loopback a token is required")
    parser.add_argument("--port", type=int, default=8088, help="0: any free one, which is printed")
    parser.add_argument("--python", help="path of the Python that runs the programs; see SandboxConfig.python")
    parser.add_argument("--slots", type=int, default=slots, help="programs that run at once (default: %(default)s)")
    parser.add_argument(
        "--token",
        default=os.environ.get(TOKEN_VARIABLE, "").strip(),  # a line read from a file ends in a newline
        help=f"what clients must send; better given as {TOKEN_VARIABLE}, which other users cannot see",
    )
    parser.add_argument("--wall-s", type=float, default=10.0, help="limit if a request has none (default: %(default)s)")
    parser.add_argument(
        "--memory-mb", type=int, default=limits.memory_bytes >> 20, help="the most for a program (default: %(default)s)"
    )
    parser.add_argument(
        "--output-chars",
        type=int,
        default=1000,
        help="what /run answers of stdout and of stderr, Code Judge's MAX_STDOUT_ERROR_LENGTH (default: %(default)s)",
    )
    parser.add_argument(
        "--session-idle-s", type=float, default=600.0, help="a session without a cell for so long ends (%(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        options.address = Address(host=options.host, port=options.port, token=options.token)
    except ValueError as error:
        sys.exit(f"--{error}")
    bounds = {
        "wall_s": MAX_WALL_S,
        "memory_mb": 1 << 20,
        "output_chars": 1 << 20,
        "slots": 1000,
        "session_idle_s": MAX_IDLE_S,
    }
    for name, most in bounds.items():
        if not 0 < getattr(options, name) <= most:
            value = getattr(options, name)
            sys.exit(f"--{name.replace('_', '-')} must be above 0 and at most {most:g}, got {value:g}")
    limits = Limits(wall_s=options.wall_s, cpu_s=options.wall_s, memory_bytes=options.memory_mb << 20)
    options.config = SandboxConfig(slots=options.slots, limits=limits, python=options.python)
    return options


def main() -> None:
    print_logs()
    options = parse()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection each; the usual 1024 are too few
    sys.exit(uvloop.run(serve(options)))
