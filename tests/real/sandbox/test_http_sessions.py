"""Sessions over HTTP: what lives between requests, how a session ends, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from sandbox.http.sessions import SESSIONS
from tests.support.sandbox_gateway import Server, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
DEADLINE_S = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with serving("slots=2", "memory_mb=256") as running_server:
        yield running_server


async def start(server: Server, **options: Any) -> str:
    status, answer = await server.post("/session/start", options)
    assert status == 200
    assert answer["idle_s"] > 0
    name = answer["session"]
    assert len(name) >= 16
    return str(name)


async def run(server: Server, session: str, code: str, **options: Any) -> Any:
    status, answer = await server.post("/session/run", {"session": session, "code": code, **options})
    assert status == 200
    return answer


async def test_cells_share_their_state_and_no_other_session_does(server: Server) -> None:
    one, two = await start(server), await start(server)
    first = await run(server, one, "x = 20\nprint(input())", stdin="typed")
    assert (first["outcome"], first["stdout"], first["session_state"], first["exit_code"]) == (
        "ok",
        "typed\n",
        "kept",
        0,
    )
    assert (await run(server, one, "x + 1"))["display"] == "21"
    other = await run(server, two, "x")
    assert (other["outcome"], other["exit_code"], other["session_state"]) == ("error", 1, "kept")
    assert "NameError" in other["stderr"]
    slow = await run(server, one, "print('out')\nwhile True: pass", timeout=0.3)
    assert (slow["outcome"], slow["stdout"], slow["session_state"]) == ("timeout", "out\n", "kept")
    assert slow["wall_s"] >= 0.3
    assert (await run(server, one, "x"))["display"] == "20"


async def test_a_seed_repeats_the_random_numbers(server: Server) -> None:
    code = "import random; random.random()"
    drawn = [(await run(server, await start(server, seed=seed), code))["display"] for seed in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2]


async def test_an_ended_session_is_known_no_more_and_its_cell_ends_with_it(server: Server) -> None:
    session = await start(server)
    before = await server.metric('calls_total{dialect="session",outcome="unavailable"}')
    async with asyncio.TaskGroup() as group:
        busy = group.create_task(
            server.post("/session/run", {"session": session, "code": "import time; time.sleep(60)", "timeout": 60}),
            name="busy",
        )
        await server.until_metric("calls_in_flight", 1)
        assert await server.post("/session/end", {"session": session}) == (200, {})
        async with asyncio.timeout(DEADLINE_S):
            assert (await busy)[0] == 404
    assert await server.metric('calls_total{dialect="session",outcome="unavailable"}') == before + 1
    for path, message in (("/session/run", {"code": "1"}), ("/session/end", {})):
        status, answer = await server.post(path, {"session": session, **message})
        assert (status, session in answer["detail"]) == (404, True)


async def test_a_session_without_cells_ends_and_one_with_a_long_cell_does_not() -> None:
    async with serving("slots=2", "session_idle_s=0.5", ROCSTAR_SANDBOX_TOKEN="t") as server:
        assert (await server.post("/session/start", {}))[0] == 401
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer t"}) as http:
            owner = Server(url=server.url, line=server.line, process=server.process, http=http)
            idle, busy = await start(owner), await start(owner)
            long = await run(owner, busy, "import time; time.sleep(1.2); 7")
            assert (long["display"], long["session_state"]) == ("7", "kept")
            assert (await run(owner, busy, "8"))["display"] == "8"
            assert (await owner.post("/session/run", {"session": idle, "code": "1"}))[0] == 404


@pytest.mark.parametrize(
    ("path", "message", "status", "words"),
    [
        ("/session/run", {"session": "x", "code": "1", "timeout": 0}, 422, ("timeout", "got 0")),
        ("/session/run", {"session": "x", "code": 1}, 422, ("$.code", ": 1")),
        ("/session/run", {"session": "x", "code": "1", "limit": 3}, 422, ("limit",)),
        ("/session/start", {"seed": -1}, 422, ("$.seed", "-1")),
        ("/session/end", {}, 422, ("session",)),
    ],
)
async def test_bad_requests_name_field_and_value(
    server: Server, path: str, message: object, status: int, words: tuple[str, ...]
) -> None:
    got, answer = await server.post(path, message)
    assert (got, [word for word in words if word not in answer["detail"]]) == (status, [])


async def test_the_number_of_sessions_is_bounded() -> None:
    async with serving("slots=1") as server:
        names = [await start(server) for _ in range(SESSIONS)]
        status, answer = await server.post("/session/start", {})
        assert (status, str(SESSIONS) in answer["detail"]) == (429, True)
        assert (await server.post("/session/end", {"session": names[0]}))[0] == 200
        await start(server)


async def test_the_root_lists_what_there_is_and_a_wrong_path_points_to_it(server: Server) -> None:
    status, answer = await server.get("/")
    assert (status, answer["languages"]) == (200, ["python"])
    for endpoint in ("POST /session/run", "POST /run_code", "POST /judge/long-batch", "GET /health", "GET /metrics"):
        assert endpoint in answer["endpoints"]
    status, answer = await server.get("/docs")
    assert (status, "/docs" in answer["detail"], "GET /" in answer["detail"]) == (404, True, True)
    async with server.http.get(server.url + "/run") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
