"""The HTTP gateway whatever the dialect: start and end, token, bounds, bad requests, clients that leave, lost calls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from sandbox import Limits, Sandbox
from sandbox.config import stays_here
from sandbox.http.connections import Connections
from sandbox.http.gateway import BODY_BYTES, HELD_BYTES, Budget, Share
from sandbox.http.incoming import token_of
from sandbox.http.listener import Address, listening
from sandbox.http.server import make_app
from sandbox.wire import MAX_CODE_BYTES
from tests.support.sandbox_gateway import JSON, Server, command, output_of, serving, started
from tests.support.sandbox_level import news
from tests.support.sandbox_processes import descendants, parent_of, running, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
SLEEP = "import time\ntime.sleep(60)"
LONG = MAX_CODE_BYTES + 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with serving("slots=2", "memory_mb=512") as running_server:
        yield running_server


async def test_says_where_it_serves_and_how(server: Server) -> None:
    assert server.line.startswith("sandbox at http://127.0.0.1:")
    assert ", isolation " in server.line
    assert server.line.endswith(", 2 slots\n")
    status, health = await server.get("/health")
    assert (status, health["status"]) == (200, "ok")
    assert health["level"] in server.line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_with_all_its_processes(number: signal.Signals) -> None:
    async with started("slots=1", stderr=asyncio.subprocess.PIPE) as server, asyncio.TaskGroup() as group:
        process = server.process
        request = group.create_task(_failing_post(server), name="busy")
        await server.until_metric("calls_in_flight", 1)
        pids = list(descendants(process.pid))
        assert len(pids) >= 4  # host, nsjail, zygote, slot
        process.send_signal(number)
        async with asyncio.timeout(20):
            _, stderr = await process.communicate()
            await request
        assert (process.returncode, news(stderr.decode())) == (0, [])
        assert [pid for pid in pids if running(pid)] == []


async def _failing_post(server: Server) -> None:
    with pytest.raises(aiohttp.ClientError):
        await server.post("/run_code", {"code": SLEEP, "run_timeout": 60})


async def test_without_a_jail_it_ends_with_the_reason() -> None:
    status, stderr = await output_of(*command("nsjail=/bin/false"))
    assert status == 1
    assert "nsjail" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr


async def test_a_sandbox_that_is_gone_is_503() -> None:
    box = Sandbox()  # never opened
    app = make_app(
        box, limits=Limits(), slots=1, output_chars=9, session_idle_s=9, token="", connections=Connections(most=100)
    )
    program = {"type": "python", "solution": "1"}
    async with listening(app, Address()) as url, aiohttp.ClientSession() as http:
        for path, message in (
            ("/run", program),
            ("/run/long-batch", {"submissions": [program, program]}),
            ("/run_code", {"code": "1"}),
        ):
            async with http.post(url + path, json=message) as response:
                assert response.status == 503
                assert "not open" in (await response.json())["detail"]
        async with http.get(url + "/health") as response:
            assert response.status == 503


async def test_options_that_cannot_be_are_one_line() -> None:
    for arguments, code, words in (
        (("host=0.0.0.0",), 2, ("host 0.0.0.0", "token")),
        (("host=192.0.2.1", "token=t"), 1, ("192.0.2.1", "port")),
        (("wall_s=0",), 2, ("wall_s", "got 0")),
        (("slots=1001",), 2, ("slots", "got 1001")),
    ):
        status, stderr = await output_of(*command(*arguments))
        assert status == code
        [line] = news(stderr)
        assert all(word in line for word in words)


async def test_a_token_is_required_when_there_is_one() -> None:
    async with serving("host=0.0.0.0", "slots=1", ROCSTAR_SANDBOX_TOKEN="s3cret\n") as server:
        port = server.url.rsplit(":", 1)[1]
        for path in ("/health", "/metrics", "/status", "/ping"):
            assert (await server.get(path))[0] == 401
        for wrong in ("Bearer s3cre", "Bearer ", "s3cret", "Basic s3cret", "Basic !", "Bearer \u00e9"):
            status, answer = await server.post("/run_code", {"code": "1"}, headers={"Authorization": wrong})
            assert (status, "run_result" in answer) == (401, False)
        assert b" 401 " in await raw(
            int(port), b"GET /health HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\r\n\r\n"
        )
        assert (await server.get("/health", headers={"Authorization": "Bearer s3cret"}))[0] == 200
        async with server.http.get(f"http://any:s3cret@127.0.0.1:{port}/health") as response:  # as clients with a URL
            assert response.status == 200


async def raw(port: int, request: bytes) -> bytes:
    """The first line of the answer to bytes that aiohttp's client would not send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(10):
        line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return line


async def test_where_a_token_is_looked_for() -> None:
    def token(authorization: str) -> str:
        return token_of({"Authorization": authorization})

    assert token("bearer  a") == token("Basic Ong6YQ==").removeprefix("x:") == token_of({"x-api-key": "a"}) == "a"
    assert [token(text) for text in ("", "Basic", "Basic YQ==", "Digest a")] == [""] * 4
    assert [stays_here(f"tcp://{host}:0") for host in ("127.0.0.9", "::1", "localhost")] == [True] * 3
    assert [stays_here(f"tcp://{host}:0") for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")] == [False] * 5


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/run", b'{"type": "python"', 400, ("no JSON",)),
        ("/run", b'{"type": "python", "solution": "\xff"}', 400, ("no JSON",)),
        ("/run", b'{"type": "python", "solution": 3}', 422, ("$.solution", "int", ": 3")),
        ("/run", b'{"type": "python"}', 422, ("solution",)),
        ("/run", b'{"type": 1, "x"', 400, ("no JSON",)),
        ("/run_code", b'{"code": "1", "compile_timeout": NaN}', 400, ("no JSON", "'NaN'")),
        ("/run_code", b'{"code": "1", "run_timeout": 1%s}' % (b"0" * 400), 422, ("$.run_timeout",)),
        ("/run/batch", b'{"submissions": [{"type": 3}], "submissions": 5}', 422, ("$.submissions", ": 5")),
        ("/judge", b'{"type": "cpp", "solution": ""}', 422, ("type", "'cpp'", "['python']")),
        ("/run/batch", b'{"submissions": [{"type": "python", "solution": null}]}', 422, ("$.submissions[0].solution",)),
        ("/run", b'{"x": ' + b"[" * 100_000, 400, ("no JSON", "recursion")),
        ("/run", b'{"type": "python", "solution": "%s"}' % (b"#" * LONG), 422, ("8388608", f"got {LONG}")),
        ("/run_code", b'{"code": "%s"}' % ("#é" + "é" * (LONG // 2 - 1)).encode(), 422, ("8388608", f"got {LONG}")),
        ("/run_code", b'{"code": "1", "memory_limit_MB": 1e308}', 422, ("memory_limit_MB", "got 1e+308")),
        ("/judge/long-batch", b'{"submissions": []}', 422, ("$.submissions", ": []")),
        ("/run_code", b"[]", 422, ("object", "array")),
        ("/run_code", b'{"code": "1", "run_timeout": "1"}', 422, ("$.run_timeout", ": '1'")),
        ("/run_code", b'{"code": "1", "run_timeout": 0}', 422, ("run_timeout", "got 0")),
        ("/run_code", b'{"code": "1", "run_timeout": 1e9}', 422, ("run_timeout", "got 1e+09")),
        ("/run_code", b'{"code": "1", "memory_limit_MB": 513}', 422, ("memory_limit_MB", "memory_mb", "got 513")),
        ("/run_code", b'{"code": "1", "language": "cpp"}', 422, ("language", "'cpp'", "['python']")),
        ("/run_code", b'{"code": "1", "files": {"a": "YQ=="}}', 422, ("files", "['a']")),
        ("/run_code", b'{"code": "1", "fetch_files": ["a"]}', 422, ("fetch_files", "['a']")),
    ],
)
async def test_bad_requests_name_field_and_value(
    server: Server, path: str, body: bytes, status: int, words: tuple[str, ...]
) -> None:
    got, answer = await server.post_bytes(path, body)
    assert (got, [word for word in words if word not in answer["detail"]]) == (status, [])


async def test_other_content_and_large_bodies_are_refused(server: Server) -> None:
    async with server.http.post(server.url + "/run", data=b"{}", headers={"Content-Type": "text/plain"}) as response:
        assert response.status == 415
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with aiohttp.ClientSession() as http, http.post(server.url + "/run", data=b"{}", headers=headers) as response:
        assert response.status == 400
        assert "headers" in (await response.json())["detail"]
    headers = {"Content-Type": "application/json", "Content-Length": str(BODY_BYTES + 1)}
    async with (
        aiohttp.ClientSession() as http,  # of its own: nothing can follow a body that is not sent
        http.post(server.url + "/run", data=b"", headers=headers) as response,
    ):
        assert response.status == 413


async def test_clients_that_declare_much_and_send_little_keep_no_request_waiting(server: Server) -> None:
    kind = "Content-Type: application/json"
    head = f"POST /run HTTP/1.1\r\nHost: localhost\r\n{kind}\r\nContent-Length: {BODY_BYTES}\r\n\r\n{{"
    connections = []
    try:
        for _ in range(100):
            connections.append(await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
            connections[-1][1].write(head.encode())
            await connections[-1][1].drain()
        assert (await server.get("/ping"))[0] == 200  # what they sent has been read
        for size in (0, 200_000):
            async with asyncio.timeout(10):
                program = {"type": "python", "solution": f"print(1) # {'x' * size}"}
                status, answer = await server.post("/run", program)
            assert (status, answer["stdout"]) == (200, "1\n")
    finally:
        for _, writer in connections:
            writer.close()
            await writer.wait_closed()


async def test_bodies_without_a_length_hold_what_they_turn_out_to_be(server: Server) -> None:
    calls = HELD_BYTES // BODY_BYTES + 1
    body = msgspec.json.encode({"type": "python", "solution": SLEEP})

    async def post() -> None:
        with contextlib.suppress(TimeoutError):
            timeout = aiohttp.ClientTimeout(total=10)
            async with server.http.post(server.url + "/run", data=body, headers=JSON, chunked=True, timeout=timeout):
                pass

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(post(), name=f"post-{number}") for number in range(calls)]
        await server.until_metric("calls_in_flight", calls)
        for task in tasks:
            task.cancel()
    await server.until_metric("calls_in_flight", 0)


async def test_a_client_that_leaves_ends_its_calls(server: Server) -> None:
    sleeper = {"type": "python", "solution": SLEEP}
    for path, message, calls in (
        ("/run_code", {"code": SLEEP, "run_timeout": 60}, 1),
        ("/run/long-batch", {"submissions": [sleeper] * 5}, 5),
    ):
        dialect = "fusion" if path == "/run_code" else "judge"
        cancelled = f'calls_total{{dialect="{dialect}",outcome="cancelled"}}'
        before = await server.metric(cancelled)
        with pytest.raises(TimeoutError):
            await server.post(path, message, timeout=aiohttp.ClientTimeout(total=0.5))
        await server.until_metric(cancelled, before + calls)
        await server.until_metric("calls_in_flight", 0)
    status, answer = await server.post("/run_code", {"code": "print(1)"})  # the slots are free again
    assert (status, answer["run_result"]["stdout"]) == (200, "1\n")


async def test_metrics(server: Server) -> None:
    name = 'calls_total{dialect="judge",outcome="error"}'
    before, observed = await server.metric(name), await server.metric("call_wall_seconds_count")
    await server.post("/run", {"type": "python", "solution": "1/0"})
    assert await server.metric(name) == before + 1
    assert await server.metric("call_wall_seconds_count") == observed + 1
    assert await server.metric("call_queue_seconds_count") == observed + 1
    assert await server.metric("hosts") >= 1


async def test_lost_calls_are_the_servers_fault() -> None:
    """The host is killed under a call, and again under the call's second try."""
    async with serving("slots=2", "wall_s=60") as server:
        pid = server.process.pid

        def guests() -> int:  # each has an init above it
            return sum("-m sandbox.host" not in line for line in descendants(pid).values())

        async with asyncio.TaskGroup() as group:
            idle = guests()
            fusion = group.create_task(server.post("/run_code", {"code": SLEEP, "run_timeout": 60}), name="fusion")
            judge = group.create_task(server.post("/run", {"type": "python", "solution": SLEEP}), name="judge")
            for _ in range(2):
                await until(lambda: guests() >= idle + 4)
                hosts = [p for p, line in descendants(pid).items() if "-m sandbox.host" in line]
                host = next(p for p in hosts if parent_of(p) == pid)  # its janitor bears the same name
                os.kill(host, signal.SIGKILL)
                await until(lambda: not running(host))  # noqa: B023
        status, answer = fusion.result()
        assert (status, answer["status"], answer["run_result"]) == (504, "SandboxError", None)
        status, answer = judge.result()
        assert (status, answer["reason"], answer["run_success"]) == (200, "queue_timeout", False)
        assert (await server.get("/health"))[0] == 200


async def test_a_budget_keeps_enough_for_the_body_that_began_first() -> None:
    budget, grown = Budget(10, reserve=4), list[str]()

    async def grow(name: str, share: Share, size: int) -> None:
        await budget.grow(share, size)
        grown.append(name)

    with budget.share() as first, budget.share() as second:
        with budget.share() as third:
            async with asyncio.TaskGroup() as group:
                await grow("second", second, 5)
                waits = group.create_task(grow("third", third, 2), name="third")
                await asyncio.sleep(0)
                await grow("first", first, 4)
                assert (grown, waits.done()) == (["second", "first"], False)
                budget.complete(first)
                await asyncio.sleep(0)
                assert not waits.done()  # the second one is the first now
                await grow("second", second, 6)
                budget.complete(second)
                await asyncio.sleep(0)
                assert not waits.done()  # all is held
                waits.cancel()
        with budget.share() as fourth, pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await budget.grow(fourth, 1)
    with budget.share() as again:  # all has been given back
        await budget.grow(again, 10)
