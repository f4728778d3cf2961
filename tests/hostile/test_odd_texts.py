"""Any text as a program, an argument or a request: nothing raises in the node, and nothing keeps its loop.

What a request costs is measured as CPU of this thread, in which both the client and the server run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from engine.rollout.tool_call_parser import MalformedCall, ToolCall, ToolCallParser
from engine.tools.python_tool import PythonSessions, PythonTool
from sandbox import Limits, Sandbox, SandboxConfig
from sandbox.http.connections import Connections
from sandbox.http.listener import Address, listening
from sandbox.http.server import make_app
from tests.support.examples import examples
from tests.support.odd_texts import BUSY_S, ODD_TEXTS, in_no_time

LIMITS = Limits(wall_s=2, cpu_s=1)
ROUTES = {  # with a request that is served
    "/run": {"type": "python", "solution": "", "input": "", "expected_output": "", "sub_id": "1"},
    "/run/batch": {"type": "batch", "submissions": [{"type": "python", "solution": ""}], "sub_id": "1"},
    "/judge/long-batch": {"submissions": [{"type": "python", "solution": "", "expected_output": ""}]},
    "/run_code": {"code": "", "stdin": "", "language": "python", "run_timeout": 1, "memory_limit_MB": 256, "files": {}},
    "/session/start": {"seed": 1},
    "/session/run": {"session": "", "code": "", "stdin": "", "timeout": 1},
    "/session/end": {"session": ""},
}


class Served:
    """The gateway in this process, on loopback."""

    async def open(self) -> None:
        self.errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.errors.append(context))
        self.box = Sandbox(SandboxConfig(slots=2, limits=LIMITS))
        await self.box.__aenter__()
        app = make_app(
            self.box,
            limits=LIMITS,
            slots=2,
            output_chars=1000,
            session_idle_s=60,
            token="",
            connections=Connections(most=100),
        )
        self._stack = AsyncExitStack()
        url = await self._stack.enter_async_context(listening(app, Address()))
        self._http = await self._stack.enter_async_context(aiohttp.ClientSession(url))
        _, started = await self.post("/session/start", b"{}")
        self.session = started["session"]

    async def close(self) -> None:
        await self._stack.aclose()
        await self.box.__aexit__()

    async def post(self, path: str, body: bytes) -> tuple[int, Any]:
        async with self._http.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
            return response.status, await response.json()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def served(runner: asyncio.Runner) -> Iterator[Served]:
    served = Served()
    runner.run(served.open())
    yield served
    runner.run(served.close())
    assert served.errors == []


def through_processes(count: int) -> settings:
    """What is drawn is not made smaller: each try runs programs."""
    health = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(examples(count), phases=(Phase.explicit, Phase.reuse, Phase.generate), suppress_health_check=health)


ODD_CODE = ("import .x", "import ...", '"""\nimport ...\n"""', "from . import x", "x = '\ud800'", "\0", "(" * 2000)


@through_processes(20)
@given(ODD_TEXTS, ODD_TEXTS)
def test_any_text_is_a_program(runner: asyncio.Runner, served: Served, code: str, stdin: str) -> None:
    async def call() -> None:
        tool, sessions = PythonTool(served.box, limits=LIMITS, display=True), PythonSessions(served.box, limits=LIMITS)
        async with sessions.open() as session:
            for each in (tool, session):
                for program in (code, *ODD_CODE):
                    reply = await each({"code": program, "input": stdin})
                    assert reply.outcome != "lost"
                    assert reply.jailed
        assert (await tool({"code": "print(1)"})).text == "1"

    runner.run(call())


values = st.one_of(
    ODD_TEXTS, st.none(), st.booleans(), st.integers(), st.floats(), st.just([]), st.just({}), st.just(10**400)
)
changes = st.lists(st.tuples(st.integers(0, 9), values), max_size=3)


@through_processes(200)
@given(st.sampled_from(sorted(ROUTES)), changes, ODD_TEXTS)
@example("/run", [], "import .x")
@example("/run_code", [], "import ...")
@example("/run/batch", [], "import .x")
def test_any_request_is_answered(
    runner: asyncio.Runner, served: Served, path: str, changes: list[tuple[int, Any]], text: str
) -> None:
    """Some fields of a right request are changed; and a text alone is a body."""
    message = json.loads(json.dumps(ROUTES[path]))
    inner = message["submissions"][0] if "submissions" in message else message
    inner |= {name: text for name in ("solution", "code") if name in inner}
    if "session" in message and path != "/session/end":
        message["session"] = served.session
    for place, value in changes:
        inner[sorted(inner)[place % len(inner)]] = value

    async def ask() -> None:
        for body in (json.dumps(message).encode(), text.encode(errors="surrogatepass")):
            costs_s: list[float] = []
            while min(costs_s, default=BUSY_S) >= BUSY_S:  # once more: a collection of garbage may come in between
                assert len(costs_s) < 3, costs_s
                began = time.thread_time()
                status, answer = await served.post(path, body)
                costs_s.append(time.thread_time() - began)
            assert status in (200, 400, 404, 422), answer
            assert status == 200 or answer["detail"]
        if not changes and path in ("/run", "/run_code"):
            assert (await served.post(path, json.dumps(message).encode()))[0] == 200

    runner.run(ask())


@examples(200)
@given(ODD_TEXTS, st.integers(1, 300))
@example("<tool_call>" * 180, 2000)
@example("<tool_call>" + '{"a":' * 400, 2000)
@example("<tool_call>" + '"</tool_call>' * 150, 2000)
def test_any_text_is_a_turn(text: str, size: int) -> None:
    """Whatever a model writes has calls or none; they are found in no time, however the text comes."""

    def parse() -> list[ToolCall | MalformedCall]:
        parser, found = ToolCallParser(), []
        for at in range(0, len(text), size):
            found += parser.feed(text[at : at + size])
        return found + parser.finish()

    for call in in_no_time(parse):
        assert isinstance(call, ToolCall) or call.reason
