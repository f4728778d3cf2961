"""What both HTTP dialects share: reading a request's body, running its calls, bounds, and the form of errors.

Invariants
- Memory is bounded: the bodies held are at most HELD_BYTES in all, a call is with the sandbox only while it has one of
  CALLS turns, and a batch has at most BATCH_TASKS tasks. What is beyond a bound waits, in order, and is not refused.
  Bodies up to SMALL_BYTES are not counted: large ones that come slowly keep none of them waiting.
- A body that is not what the dialect expects is answered 4xx with `{"detail": ...}` that names field and value.
- A handler that is cancelled (its client has gone) cancels its calls.
- SandboxUnavailable is answered 503, never as a result of the program.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from .client import Sandbox, SandboxUnavailable
from .http_metrics import Metrics
from .wire import Limits, ToolResult

T = TypeVar("T")
R = TypeVar("R")
BODY_BYTES = 64 << 20  # of one request; the clients' largest batches are some MB
HELD_BYTES, SMALL_BYTES = 512 << 20, 1 << 16
BODY_S = 60.0  # a client that sends slower than this would keep others waiting for its share of HELD_BYTES
CALLS = 20_000  # each costs some KB and its code once more on its way to a host
BATCH_TASKS = 1024  # more than hosts run at once, few enough that a large batch does not keep others waiting
HEALTH_S = 5.0
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


class Refused(Exception):
    """A request that is answered with an HTTP status of 400 or more."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Budget:
    """At most `total` units are held at once; who wants more than are free waits, in order. keep(n) returns the rest.

    >>> async with budget.hold(BODY_BYTES) as keep: ...
    """

    def __init__(self, total: int) -> None:
        self._free = total
        self._turn = asyncio.Lock()  # gives the order
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, amount: int) -> AsyncIterator[Callable[[int], None]]:
        def keep(part: int) -> None:
            nonlocal amount
            self._free += amount - part
            amount = part
            self._freed.set()

        async with self._turn:
            while amount > self._free:
                self._freed.clear()
                await self._freed.wait()
            self._free -= amount
        try:
            yield keep
        finally:
            keep(0)


class Gateway:
    """The sandbox as the dialects use it; `limits` are those of a call that names none itself."""

    def __init__(self, box: Sandbox, *, limits: Limits, slots: int) -> None:
        self.limits = limits
        self.slots = slots
        self.metrics = Metrics(hosts=lambda: box.stats.hosts)
        self.in_flight = 0
        self._box = box
        self._bodies = Budget(HELD_BYTES)
        self._turns = asyncio.Semaphore(CALLS)

    def post(self, path: str, kind: type[T], answer: Callable[[T], Awaitable[web.Response]]) -> web.RouteDef:
        """A route that answers the decoded body of a request."""

        async def handle(request: web.Request) -> web.Response:
            if request.content_type != "application/json":  # a web page can send any other type to a local server
                raise Refused(415, f"Content-Type must be 'application/json', got {request.content_type!r}")
            declared = None if "Content-Encoding" in request.headers else request.content_length
            size = BODY_BYTES if declared is None else declared
            if size > BODY_BYTES:
                raise Refused(413, f"the body must be at most {BODY_BYTES} bytes, got {size}")
            async with self._bodies.hold(size) if size > SMALL_BYTES else nullcontext(lambda _: None) as keep:
                body = await _body(request)
                keep(len(body))
                return await answer(decode(kind, body))

        return web.post(path, handle)

    async def call(self, dialect: str, code: str, stdin: str, limits: Limits) -> ToolResult:
        """Run one program; counted under its outcome, or "cancelled" or "unavailable"."""
        outcome = "cancelled"
        self.in_flight += 1
        self.metrics.in_flight.set(self.in_flight)
        try:
            async with self._turns:
                result = await self._box.run(code, stdin, limits)
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
        """Return when calls run; SandboxUnavailable otherwise. Runs an empty program unless others are on their way."""
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
    """What `work` returns for each of the items, which it is given in order and several at once."""
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


def decode(kind: type[T], body: bytes) -> T:
    """The message in a body; Refused when it is no JSON or not of this kind.

    >>> decode(Submission, b'{"type": "python", "solution": 3}')
    Refused: Expected `str`, got `int` - at `$.solution`: 3
    """
    try:
        # not by msgspec, to which half of a surrogate pair is no JSON: one program with it would refuse its whole batch
        message = json.loads(body, parse_constant=int)  # which fails: NaN and Infinity are no JSON
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}") from None
    try:
        return msgspec.convert(message, kind)
    except msgspec.ValidationError as error:
        raise Refused(422, f"{error}{_value(str(error), message)}") from None


def ended_by(result: ToolResult, limits: Limits) -> str:
    """A line for stderr on what ended a program whose dialect has no word for it, else ""."""
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


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise Refused(408, f"the body took longer than {BODY_S:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise Refused(413, f"the body must be at most {BODY_BYTES} bytes") from None
    except web.RequestPayloadError:
        raise Refused(400, "the body is not encoded as its headers say") from None


def _value(error: str, value: Any) -> str:
    """What stands in the body at the place that msgspec's message names, cut to a line; "" when it names none."""
    _, found, path = error.partition(" - at `$")
    if not found or "[...]" in path:
        return ""
    for name, index in _STEP.findall(path):
        value = value[name] if name else value[int(index)]
    text = repr(value)
    return f": {text}" if len(text) <= 80 else f": {text[:80]}..."
