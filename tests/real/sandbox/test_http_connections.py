"""What clients can leave open, or send that is no request: it ends, the log stays short, honest ones are served."""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest
from aiohttp import web

from sandbox import Limits, Sandbox
from sandbox.http.connections import PATIENCE_S, Connections, Seldom
from sandbox.http.listener import Address, listening
from sandbox.http.server import make_app
from tests.support.sandbox_gateway import JSON

DEADLINE_S = 20.0
SHORT_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Here:
    """A server in this process: its port, and a client."""

    port: int
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connect(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sent)
        await writer.drain()
        return reader, writer


@asynccontextmanager
async def here(app: web.Application, connections: Connections) -> AsyncIterator[Here]:
    async with listening(app, Address(), connections) as url, aiohttp.ClientSession() as http:
        yield Here(port=int(url.rpartition(":")[2]), http=http)


@asynccontextmanager
async def gateway(*, most: int = 100, patience_s: float = PATIENCE_S, token: str = "") -> AsyncIterator[Here]:
    """The gateway before a sandbox that is not open: programs are answered 503."""
    connections = Connections(most=most, patience_s=patience_s)
    app = make_app(
        Sandbox(), limits=Limits(), slots=1, output_chars=9, session_idle_s=9, token=token, connections=connections
    )
    async with here(app, connections) as server:
        yield server


async def closed(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes the connection."""
    got = b""
    async with asyncio.timeout(DEADLINE_S):
        try:
            while part := await reader.read(1 << 16):
                got += part
        except ConnectionResetError:
            pass
    return got


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /ping HTTP/1.1\r\nHost:",
        b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\nGET /pi",
        b"POST /run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
    ],
    ids=["nothing", "half of the headers", "one request", "one and a half", "half of a body"],
)
async def test_a_connection_on_which_nothing_comes_is_closed(sent: bytes) -> None:
    async with gateway(patience_s=SHORT_S) as server:
        reader, writer = await server.connect(sent)
        answers = await closed(reader)
        assert answers.count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\n") - sent.count(b"POST")
        writer.close()


async def test_headers_that_come_a_byte_at_a_time_do_not_keep_a_connection_open() -> None:
    async with gateway(patience_s=SHORT_S) as server:
        reader, writer = await server.connect(b"GET /ping HTTP/1.1\r\nX: ")

        async def trickle() -> None:
            while True:
                writer.write(b"x")
                await asyncio.sleep(SHORT_S / 10)

        async with asyncio.TaskGroup() as group:
            task = group.create_task(trickle(), name="trickle")
            assert await closed(reader) == b""
            task.cancel()
        writer.close()


async def test_an_answer_that_nobody_takes_is_not_kept() -> None:
    async def much(request: web.Request) -> web.Response:
        return web.Response(body=bytes(64 << 20))

    connections = Connections(most=100, patience_s=SHORT_S)
    app = web.Application()
    app.add_routes([web.get("/", much)])
    async with here(app, connections) as server:
        reader, writer = await server.connect(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        reader._transport.pause_reading()  # type: ignore[attr-defined] # as a client that is stopped
        async with asyncio.timeout(DEADLINE_S):
            while connections.count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        writer.close()
        async with server.http.get(server.url) as response:  # and one that takes it gets it, however long it takes
            size, parts = 0, response.content.iter_chunked(4 << 20)
            async for part in parts:
                size += len(part)
                await asyncio.sleep(SHORT_S / 10)
            assert size == 64 << 20


async def test_more_connections_than_there_can_be_cost_those_that_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway(most=8) as server:
        silent = [await server.connect(b"GET") for _ in range(30)]
        for _ in range(5):
            async with aiohttp.ClientSession() as http, http.get(server.url + "/ping") as response:
                assert response.status == 200
        assert await closed(silent[0][0]) == b""
        for _, writer in silent:
            writer.close()
    [line] = [record.getMessage() for record in caplog.records]
    assert "8 connections" in line
    assert "Fix: " in line


async def test_where_all_connections_are_at_work_a_further_one_is_closed() -> None:
    async def wait(request: web.Request) -> web.Response:
        with connections.at_work(request.transport):
            started.release()
            await release.wait()
        return web.Response(text="done")

    connections, started, release = Connections(most=2), asyncio.Semaphore(0), asyncio.Event()
    app = web.Application()
    app.add_routes([web.get("/", wait)])
    async with here(app, connections) as server:
        at_work = [
            await server.connect(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") for _ in range(2)
        ]
        for _ in at_work:
            await started.acquire()
        reader, writer = await server.connect()
        assert await closed(reader) == b""
        writer.close()
        release.set()
        for reader, writer in at_work:
            assert (await closed(reader)).endswith(b"done")
            writer.close()


BAD = {**JSON, "Content-Encoding": "gzip"}
WRONG_TYPE = {"Content-Type": "text/plain"}


@pytest.mark.parametrize(
    ("headers", "token", "status"), [(BAD, "t", 401), (BAD, "", 400), (WRONG_TYPE, "", 415), (JSON, "t", 401)]
)
@pytest.mark.parametrize("body", [b"{}", b"{" * (1 << 20)])
async def test_after_a_refused_request_an_honest_one_on_the_same_client_is_answered(
    headers: dict[str, str], token: str, status: int, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway(token=token) as server:
        for _ in range(20):
            async with server.http.post(server.url + "/run", data=body, headers=headers) as response:
                assert response.status == status
                assert "detail" in await response.json()
            right = {"Authorization": f"Bearer {token}"} if token else {}
            program = {"type": "python", "solution": "1"}
            async with server.http.post(server.url + "/run", json=program, headers=right) as response:
                assert response.status == 503  # a POST, which the client does not send again by itself
    assert caplog.records == []


async def test_a_connection_that_cannot_go_on_says_close() -> None:
    body = b"x" * 100
    head = b"POST /run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n"
    requests = {
        b"Content-Encoding: gzip\r\n\r\n" + body: (b" 400 ", True),
        b"\r\n" + body[1:]: (b" 401 ", True),
        b"\r\n" + body: (b" 400 ", False),
    }
    for rest, (status, close) in requests.items():
        async with gateway(token="t" if b"401" in status else "") as server:
            reader, writer = await server.connect(head + rest)
            async with asyncio.timeout(DEADLINE_S):
                answer = await reader.readuntil(b"\r\n\r\n")
            assert (status in answer, b"connection: close" in answer.lower()) == (True, close)
            writer.close()


async def test_what_is_no_http_makes_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway(token="t") as server:
        for sent in (
            b"GET / HTTP/9\r\n\r\n",
            b"GET / HTTP/1.1\r\n:\r\n\r\n",
            b"\x16\x03\x01\r\n\r\n",
            b"G\x00\r\n\r\n",
        ) * 5:
            reader, writer = await server.connect(sent)
            assert b" 400 " in await closed(reader)
            writer.close()
    assert len(caplog.records) <= 2
    assert [record.exc_info for record in caplog.records if record.exc_info] == []
    assert all("\n" not in record.getMessage() for record in caplog.records)


async def test_gzip_is_read(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway() as server:
        body = gzip.compress(b'{"type": "python", "solution": 3}')
        async with server.http.post(server.url + "/run", data=body, headers=BAD) as response:
            assert response.status == 422


async def test_a_filtered_log_counts_what_it_leaves_out() -> None:
    seldom = Seldom()

    def log(created: float, message: str, *arguments: object) -> str | None:
        record = logging.LogRecord("x", logging.WARNING, "x", 1, message, arguments, None)
        record.created = created
        return record.getMessage() if seldom.filter(record) else None

    assert log(100, "%d open", 5) == "5 open"
    assert [log(101, "%d open", 6), log(105, "%d open", 7), log(105, "other %s", "9%")] == [None, None, "other 9%"]
    late = log(111, "%d open", 8)
    assert late is not None
    assert late.startswith("8 open")
    assert "2" in late
    assert log(130, "%d open", 9) == "9 open"
