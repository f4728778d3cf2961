"""The part that both HTTP dialects share: reading a request's body, running its calls, bounds, and the form of errors.

Invariants
- Memory is bounded: bodies hold at most HELD_BYTES in all, a call is with the sandbox only while it has one of CALLS
  turns, and a batch has at most BATCH_TASKS tasks. What is beyond a bound waits and is not refused. A body counts by
  what has arrived, not by what its client declares; bodies up to SMALL_BYTES are not counted.
- A body that is not what the dialect expects is answered 4xx with `{"detail": ...}` that names field and value.
- A handler that is cancelled (its client has gone) cancels its calls.
- SandboxUnavailable is answered 503, never as a result of the program.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from sandbox.client.sandbox import Sandbox
from sandbox.client.session import Session
from sandbox.config import SandboxUnavailable
from sandbox.http.connections import Connections
from sandbox.http.incoming import Refused, read_body
from sandbox.http.metrics import Metrics
from sandbox.wire import Limits, ToolResult

T = TypeVar("T")
R = TypeVar("R")
BODY_BYTES = 64 << 20  # bounds a request; the clients' largest batches are some MB
HELD_BYTES, SMALL_BYTES = 512 << 20, 1 << 16
CALLS = 20_000  # each costs some KB and its code once more on its way to a host
BATCH_TASKS = 1024  # more than hosts run at once, few enough that a large batch does not keep others waiting
HEALTH_S = 5.0
MAX_WALL_S = 600.0  # a forgotten program would keep its slot from everybody else for longer
LANGUAGES = ("python",)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


class Share:
    """What one body holds of a Budget. wakeup: is done when the body may check again whether it can grow."""

    def __init__(self) -> None:
        self.held = 0
        self.wakeup: asyncio.Future[None] | None = None


class Budget:
    """Holds at most `total` bytes at once.

    Bodies grow until `reserve` bytes are free, which must be enough for a whole body; these are for the body that began
    first. So one body can always continue, and in the end all do.

    >>> with budget.share() as share:
    ...     await budget.grow(share, 1000)
    ...     await budget.grow(share, 2000)
    ...     budget.complete(share)
    """

    def __init__(self, total: int, *, reserve: int) -> None:
        self._free = total
        self._reserve = reserve
        self._growing: dict[Share, None] = {}  # in the order in which they began

    @contextmanager
    def share(self) -> Iterator[Share]:
        share = Share()
        self._growing[share] = None
        try:
            yield share
        finally:
            self._free += share.held
            self.complete(share)

    async def grow(self, share: Share, size: int) -> None:
        """Waits until the share may hold `size` bytes in all, and holds them."""
        while not self._may_grow(share, size - share.held):
            share.wakeup = asyncio.get_running_loop().create_future()
            await share.wakeup
        self._free -= size - share.held
        share.held = size

    def complete(self, share: Share) -> None:
        """Notes that the share grows no more."""
        self._growing.pop(share, None)
        for other in self._growing:
            if other.wakeup is not None and not other.wakeup.done():
                other.wakeup.set_result(None)

    def _may_grow(self, share: Share, more: int) -> bool:
        first = next(iter(self._growing)) is share
        return more <= self._free - (0 if first else self._reserve)


class Gateway:
    """The sandbox as the dialects use it. limits: those of a call that has none itself."""

    def __init__(self, box: Sandbox, *, limits: Limits, slots: int, connections: Connections) -> None:
        self.limits = limits
        self.slots = slots
        self.metrics = Metrics(hosts=lambda: box.stats.hosts)
        self.in_flight = 0
        self._box = box
        self._connections = connections
        self._bodies = Budget(HELD_BYTES, reserve=BODY_BYTES)
        self._turns = asyncio.Semaphore(CALLS)

    def post(self, path: str, kind: type[T], answer: Callable[[T], Awaitable[web.Response]]) -> web.RouteDef:
        """Returns a route that answers the decoded body of a request."""

        async def handle(request: web.Request) -> web.Response:
            if request.content_type != "application/json":
                raise Refused(415, f"Content-Type must be 'application/json', got {request.content_type!r}")
            with self._bodies.share() as share:
                body = await self._read(request, share)
                with self._connections.at_work(request.transport):
                    return await answer(decode(kind, body))

        return web.post(path, handle)

    async def _read(self, request: web.Request, share: Share) -> bytearray:
        """Returns the body of a request, within its share of what may be held. Raises Refused."""

        async def grow(size: int) -> None:
            if size > SMALL_BYTES:
                with self._connections.at_work(request.transport):
                    await self._bodies.grow(share, size)

        body = await read_body(request, self._connections, most=BODY_BYTES, grow=grow)
        self._bodies.complete(share)
        return body

    async def call(self, dialect: str, code: str, stdin: str, limits: Limits) -> ToolResult:
        """Runs one program; it is counted under its outcome, or "cancelled" or "unavailable"."""
        return await self._counted(dialect, lambda: self._box.run(code, stdin, limits))

    async def cell(self, session: Session, code: str, stdin: str, limits: Limits) -> ToolResult:
        """Runs one cell of a session; it is counted as `call` counts."""
        return await self._counted("session", lambda: session.run(code, stdin, limits))

    def session(self, seed: int | None) -> Session:
        """Returns a new session, to be entered."""
        return self._box.session(seed=seed, limits=self.limits)

    async def _counted(self, dialect: str, run: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        outcome = "cancelled"
        self.in_flight += 1
        self.metrics.in_flight.set(self.in_flight)
        try:
            async with self._turns:
                result = await run()
            outcome = result.outcome
            self.metrics.wall_s.observe(result.wall_s)
            self.metrics.queue_s.observe(result.queue_s)
            return result
        except SandboxUnavailable:
            outcome = "unavailable"
            raise
        finally:
            self.in_flight -= 1
            self.metrics.in_flight.set(self.in_flight)
            self.metrics.calls.labels(dialect, outcome).inc()

    async def health(self) -> None:
        """Returns if calls run; an empty program is tried unless others are under way. Raises SandboxUnavailable."""
        if self.in_flight:
            return
        try:
            async with asyncio.timeout(HEALTH_S):
                result = await self._box.run("", "", self.limits)
        except TimeoutError:
            raise SandboxUnavailable(f"an empty program was not answered within {HEALTH_S:g} s") from None
        if result.outcome != "ok":
            raise SandboxUnavailable(f"an empty program ended with outcome {result.outcome!r}")


async def in_order(items: Sequence[T], work: Callable[[T], Awaitable[R]]) -> list[R]:
    """Returns what `work` returns for each item. Items are started in order, several at once."""
    results: dict[int, R] = {}
    todo = iter(enumerate(items))

    async def worker() -> None:
        for index, item in todo:
            results[index] = await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(min(len(items), BATCH_TASKS)):
                group.create_task(worker(), name=f"batch-{number}")
    except ExceptionGroup as errors:
        unavailable, others = errors.split(SandboxUnavailable)
        if unavailable is None or others is not None:
            raise
        raise unavailable.exceptions[0] from None
    return [results[index] for index in range(len(items))]


def decode(kind: type[T], body: bytes | bytearray) -> T:
    """Returns the message in a body. Raises Refused if it is not JSON or not of this kind.

    >>> decode(Submission, b'{"type": "python", "solution": 3}')
    Refused: Expected `str`, got `int` - at `$.solution`: 3
    """
    try:
        # Not by msgspec, which refuses half of a surrogate pair: one program with it would refuse its whole batch.
        message = json.loads(body, parse_constant=int)  # it fails for NaN and Infinity, which are not JSON
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}") from None
    try:
        return msgspec.convert(message, kind)
    except msgspec.ValidationError as error:
        raise Refused(422, f"{error}{_value(str(error), message)}") from None


def check_language(name: str, language: str) -> None:
    """Raises ValueError, naming all languages, for any other. name: the field that has it."""
    if language not in LANGUAGES:
        raise ValueError(f"{name} must be one of {list(LANGUAGES)}, got {language[:80]!r}")


def wall_s_of(name: str, seconds: float | None, default_s: float) -> float:
    """Returns a request's wall limit. Raises Refused for one that it cannot have. name: the field that has it."""
    wall_s = default_s if seconds is None else seconds
    if not 0 < wall_s <= MAX_WALL_S:
        raise Refused(422, f"{name} must be above 0 and at most {MAX_WALL_S:g}, got {wall_s:g}")
    return wall_s


def ended_by(result: ToolResult, limits: Limits) -> str:
    """Returns a line for stderr on the end of a program, if its dialect has no other way to tell, else ""."""
    match result.outcome:
        case "memory":
            return f"[sandbox] ended: out of memory, the limit is {limits.memory_bytes >> 20} MiB\n"
        case "output":
            return (
                f"[sandbox] ended: a file or output larger than {max(limits.disk_bytes, limits.output_bytes)} bytes\n"
            )
        case "killed":
            return "[sandbox] ended: killed by a signal\n"
    return ""


def json_response(message: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(message), content_type="application/json", status=status)


async def pong(request: web.Request) -> web.Response:
    return json_response("pong")


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as error:
        return json_response({"detail": str(error)}, error.status)
    except SandboxUnavailable as error:
        return json_response({"detail": str(error)}, 503)
    except web.HTTPMethodNotAllowed as error:
        response = json_response({"detail": f"{request.path} takes {error.headers['Allow']} only"}, error.status)
        response.headers["Allow"] = error.headers["Allow"]
        return response
    except web.HTTPNotFound as error:
        return json_response({"detail": f"there is no {request.path}; GET / lists what there is"}, error.status)


def _value(error: str, value: Any) -> str:
    """Returns what the body has at the place that msgspec's message names, cut to a line; "" if it names none."""
    _, place, path = error.partition(" - at `$")
    if not place or "[...]" in path:
        return ""
    for name, index in _STEP.findall(path):
        value = value[name] if name else value[int(index)]
    text = repr(value)
    return f": {text}" if len(text) <= 80 else f": {text[:80]}..."
