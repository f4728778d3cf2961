"""`rocstar sandbox-http` as a process, and requests to it."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.support.paths import ROCSTAR, ROOT

JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, kw_only=True)
class Server:
    url: str
    line: str  # that it printed
    process: asyncio.subprocess.Process
    http: aiohttp.ClientSession

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.http.get(self.url + path, **options) as response:
            return response.status, await response.json()

    async def post(self, path: str, message: object, **options: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=message, **options) as response:
            return response.status, await response.json()

    async def post_bytes(self, path: str, body: bytes) -> tuple[int, Any]:
        async with self.http.post(self.url + path, data=io.BytesIO(body), headers=JSON) as response:
            return response.status, await response.json()

    async def metric(self, name: str) -> float:
        """The value of a metric, written as in the page but for the prefix; 0 when it is not there yet."""
        async with self.http.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"rocstar_sandbox_{name} ")), 0)

    async def until_metric(self, name: str, value: float) -> None:
        async with asyncio.timeout(20):
            while await self.metric(name) != value:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def command(*arguments: str) -> list[str]:
    return [*ROCSTAR, "sandbox-http", "port=0", *arguments]


@asynccontextmanager
async def started(*arguments: str, stderr: int | None = None, **environment: str) -> AsyncIterator[Server]:
    """A server that serves; killed in the end unless it has ended."""
    env = {**os.environ, **environment}
    process = await asyncio.create_subprocess_exec(
        *command(*arguments), stdout=asyncio.subprocess.PIPE, stderr=stderr, cwd=ROOT, env=env
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            line = (await process.stdout.readline()).decode()
        url = line.removeprefix("sandbox at ").partition(",")[0]
        async with aiohttp.ClientSession() as http:
            yield Server(url=url, line=line, process=process, http=http)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def serving(*arguments: str, **environment: str) -> AsyncIterator[Server]:
    """A server that serves; ended by SIGTERM, with status 0."""
    async with started(*arguments, **environment) as server:
        yield server
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await server.process.wait() == 0


async def output_of(*arguments: str, **environment: str) -> tuple[int | None, str]:
    """Exit status and stderr of a command that is to end by itself."""
    pipe, env = asyncio.subprocess.PIPE, {**os.environ, **environment}
    process = await asyncio.create_subprocess_exec(*arguments, stderr=pipe, cwd=ROOT, env=env)
    try:
        async with asyncio.timeout(30):
            _, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, stderr.decode()
