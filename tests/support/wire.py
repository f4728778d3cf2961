"""What clients send and get, noted between them and the gateway: a proxy, which they find in HTTP_PROXY.

It asks for the ids of each answer, so a client that knows nothing of them is given them too.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web


@dataclass(frozen=True, kw_only=True)
class Given:
    """A turn as its client got it. path: where it was asked for, without the session."""

    session: str
    path: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass
class Wire:
    """turns: all that clients were given. refused: the status and text of each other answer."""

    address: str = ""
    turns: list[Given] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)

    async def pass_on(self, request: web.BaseRequest, client: aiohttp.ClientSession) -> web.Response:
        body = json.loads(await request.read())
        headers = {name: value for name, value in request.headers.items() if name not in ("Host", "Content-Length")}
        asked = client.post(request.url, json={**body, "return_token_ids": True}, headers=headers)
        async with asked as answer:
            text = await answer.text()
        if answer.status == 200:
            self.turns.append(_given(request.path, json.loads(text)))
        else:
            self.refused.append((answer.status, text))
        return web.Response(text=text, status=answer.status, content_type="application/json")


@asynccontextmanager
async def wire() -> AsyncIterator[Wire]:
    noted = Wire()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as client:

        async def handle(request: web.BaseRequest) -> web.Response:
            return await noted.pass_on(request, client)

        runner = web.ServerRunner(web.Server(handle))
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            noted.address = f"http://{host}:{port}"
            yield noted
        finally:
            await runner.cleanup()


def _given(path: str, answer: dict) -> Given:
    _, _, session, asked = path.split("/", 3)
    if "choices" in answer:
        prompt, sampled = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    else:
        prompt, sampled = answer["prompt_token_ids"], answer["token_ids"]
    return Given(session=session, path=f"/{asked}", prompt_ids=tuple(prompt), token_ids=tuple(sampled))
