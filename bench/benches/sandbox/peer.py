"""Other sandboxes that speak HTTP, in two dialects: Code Judge's `/run` and SandboxFusion's `/run_code`.

A server on this machine has its CPU counted: the processes that listen on its port and all below them, and those given
with peer_pids (Code Judge: also redis and the workers, which are no children of the process that listens).
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import aiohttp

from bench.benches.sandbox.contenders import Server
from bench.measuring.meter import Meter, listeners, local_port

Dialect = Literal["judge", "fusion"]
DIALECTS: tuple[Dialect, ...] = ("judge", "fusion")
DEADLINE_S = 120.0  # for one call, its time in the peer's queue included


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerAddress:
    """A peer, `judge=http://127.0.0.1:8000`, and the roots of its process trees beside the one that listens."""

    dialect: Dialect
    url: str
    pids: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str, pids: Iterable[str]) -> PeerAddress:
        name, _, url = text.partition("=")
        dialect = next((known for known in DIALECTS if known == name), None)
        if dialect is None or not urlsplit(url).hostname:
            raise ValueError(f"peer_urls must be judge=http://... or fusion=http://..., got {text!r}")
        given = [value for name, _, value in (pid.partition(":") for pid in pids) if name == dialect]
        if not all(value.isdecimal() for value in given):
            raise ValueError(f"peer_pids must be judge:PID or fusion:PID, got {', '.join(pids)}")
        return cls(dialect=dialect, url=url.rstrip("/"), pids=tuple(map(int, given)))


@asynccontextmanager
async def open_peer(address: PeerAddress, concurrency: int) -> AsyncIterator[Server]:
    parts = urlsplit(address.url)
    port = local_port(parts.hostname or "", parts.port or 80)
    roots = {*address.pids, *(listeners(port) if port else [])}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def run(code: str) -> str:
            try:
                return await _call(http, address, code)
            except (aiohttp.ClientError, TimeoutError):
                return ""

        meter = Meter(roots)
        cpu_s = meter.cpu_s if roots else lambda: math.nan  # on another machine
        try:
            yield Server(name=address.dialect, run=run, cpu_s=cpu_s, concurrency=concurrency)
        finally:
            meter.close()


async def _call(http: aiohttp.ClientSession, address: PeerAddress, code: str) -> str:
    if address.dialect == "judge":
        async with http.post(f"{address.url}/run", json={"type": "python", "solution": code}) as response:
            answer = await response.json()
            return (answer.get("stdout") or "") if response.status == 200 else ""
    async with http.post(f"{address.url}/run_code", json={"language": "python", "code": code}) as response:
        answer = await response.json()
        return ((answer.get("run_result") or {}).get("stdout") or "") if response.status == 200 else ""
