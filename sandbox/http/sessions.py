"""Sessions over HTTP: cells of Python that share one interpreter, in JSON.

    POST /session/start  {}                                      -> {"session": "...", "idle_s": 600}
    POST /session/run    {"session": "...", "code": "x = 20"}    -> {"outcome": "ok", "session_state": "kept", ...}
    POST /session/end    {"session": "..."}                      -> {}

Invariants
- A session lives until it is ended, or until no cell of it has run for `idle_s`. There are at most SESSIONS; one more
  is refused with 429.
- It belongs to whoever has the server's token and its name, which cannot be guessed. A name that is not, or no longer,
  that of a session is answered 404; so is a cell that runs while its session is ended.
- Its cells run one at a time, in the order in which they come. Every end of a cell, a timeout too, is an answer with
  status 200.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from sandbox.client.session import Session
from sandbox.config import SandboxUnavailable
from sandbox.http.gateway import Gateway, json_response, wall_s_of
from sandbox.http.incoming import Refused
from sandbox.wire import Outcome, Seed, SessionState, encode_code

SESSIONS = 1000  # each holds a process, and on a host some MB; beyond the host's memory the idle ones are rebuilt


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Starts a session. seed: determines its random numbers; by default each session has another one."""

    seed: Seed | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Runs a cell.

    >>> {"session": "...", "code": "print(x + int(input()))", "stdin": "1", "timeout": 5}
    """

    session: str
    code: str
    stdin: str = ""
    timeout: float | None = None

    def __post_init__(self) -> None:
        encode_code(self.code)


class End(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    session: str


class Started(msgspec.Struct, frozen=True):
    session: str
    idle_s: float


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a cell: see ToolResult."""

    outcome: Outcome
    stdout: str
    stderr: str
    display: str | None
    exit_code: int | None
    truncated: bool
    wall_s: float
    session_state: SessionState | None


@dataclass(kw_only=True, slots=True)
class _Open:
    """An open session: cells that run or wait, the timer of its idleness, and whether it is over."""

    session: Session
    cells: int = 0
    timer: asyncio.TimerHandle | None = None
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Sessions:
    """The routes of sessions; `lifetime` owns them."""

    def __init__(self, gateway: Gateway, *, idle_s: float) -> None:
        self._gateway = gateway
        self._idle_s = idle_s
        self._open: dict[str, _Open] = {}
        self._group = asyncio.TaskGroup()

    def routes(self) -> list[web.RouteDef]:
        post = self._gateway.post
        return [
            post("/session/start", Start, self._start),
            post("/session/run", Run, self._run),
            post("/session/end", End, self._end),
        ]

    async def lifetime(self, app: web.Application) -> AsyncIterator[None]:
        """Runs from the start of the server until its end, and then ends all sessions."""
        async with self._group:
            yield
            for name in list(self._open):
                self._finish(name)

    async def _start(self, request: Start) -> web.Response:
        if len(self._open) >= SESSIONS:
            raise Refused(429, f"{SESSIONS} sessions are open, as many as there can be: end one at /session/end")
        name = secrets.token_urlsafe(16)
        opened = _Open(session=self._gateway.session(request.seed))
        self._open[name] = opened
        self._group.create_task(self._hold(opened), name=f"session-{name[:4]}")
        self._set_timer(name, opened)
        await opened.entered.wait()
        return json_response(Started(name, self._idle_s))

    async def _run(self, request: Run) -> web.Response:
        limits = self._gateway.limits
        wall_s = wall_s_of("timeout", request.timeout, limits.wall_s)
        limits = msgspec.structs.replace(limits, wall_s=wall_s, cpu_s=wall_s)
        opened = self._find(request.session)
        opened.cells += 1
        self._set_timer(request.session, opened)
        try:
            result = await self._gateway.cell(opened.session, request.code, request.stdin, limits)
        except SandboxUnavailable:
            if opened.over.is_set():
                raise _no_such(request.session) from None
            raise
        finally:
            opened.cells -= 1
            self._set_timer(request.session, opened)
        return json_response(
            Ran(
                outcome=result.outcome,
                stdout=result.stdout,
                stderr=result.stderr,
                display=result.display,
                exit_code=result.exit_code,
                truncated=result.truncated,
                wall_s=result.wall_s,
                session_state=result.session_state,
            )
        )

    async def _end(self, request: End) -> web.Response:
        self._find(request.session)
        self._finish(request.session)
        return json_response({})

    def _find(self, name: str) -> _Open:
        if name not in self._open:
            raise _no_such(name)
        return self._open[name]

    def _set_timer(self, name: str, opened: _Open) -> None:
        """Ends the session in `idle_s`, unless a cell runs or it is over."""
        if opened.timer is not None:
            opened.timer.cancel()
            opened.timer = None
        if not opened.cells and not opened.over.is_set():
            opened.timer = asyncio.get_running_loop().call_later(self._idle_s, self._finish, name)

    def _finish(self, name: str) -> None:
        opened = self._open.pop(name)
        opened.over.set()
        if opened.timer is not None:
            opened.timer.cancel()

    async def _hold(self, opened: _Open) -> None:
        async with opened.session:
            opened.entered.set()
            await opened.over.wait()


def _no_such(name: str) -> Refused:
    return Refused(404, f"no session {name[:80]!r}: it was never started, was ended, or idle for too long")
