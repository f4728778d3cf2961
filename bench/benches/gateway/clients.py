"""Clients of a chat server in a process of their own: `python -m bench.benches.gateway.clients JSON`.

JSON: url, model, api (`bench.benches.gateway.dialects`), sessions (that talk at once), count of conversations,
max_tokens of each, tools (whether the model is shown one), stream, and seed. One JSON line at the end says what was
counted.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import aiohttp
import msgspec
import uvloop

from bench.benches.gateway.dialects import Api, Chat, Responses, begun
from bench.benches.gateway.script import MAX_TURNS, Counted, Usage, conversations

PROMPT = 60  # most tokens of a question; the first answer tells how many it has


async def talk(
    url: str,
    model: str,
    *,
    api: Api,
    sessions: int,
    count: int,
    max_tokens: int,
    tools: bool,
    stream: bool,
    seed: int,
) -> Counted:
    """Has that many conversations, `sessions` of them at once."""
    pending = iter(conversations(count, seed))
    usages: list[Usage] = []
    connector = aiohttp.TCPConnector(limit=sessions)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def work() -> None:
            for prompt in pending:
                conversation = begun(prompt, api, model=model, tools=tools, stream=stream)
                usages.extend(await _talk(http, url, conversation, max_tokens=max_tokens, stream=stream))

        async with asyncio.TaskGroup() as tasks:
            for number in range(sessions):
                tasks.create_task(work(), name=f"client-{number}")
    return Counted(
        conversations=count,
        turns=len(usages),
        sampled_tokens=sum(usage.sampled_tokens for usage in usages),
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
    )


async def _talk(
    http: aiohttp.ClientSession, url: str, conversation: Chat | Responses, *, max_tokens: int, stream: bool
) -> list[Usage]:
    """Has a conversation and returns the usage of each turn."""
    usages: list[Usage] = []
    room, goes_on = max_tokens - PROMPT, True
    while goes_on and room > 0 and len(usages) < MAX_TURNS:
        async with http.post(f"{url}{conversation.path}", json=conversation.body(room)) as response:
            if response.status != 200:
                raise RuntimeError(f"{url} answers HTTP {response.status}: {(await response.text())[:500]}")
            answer = conversation.joined(await _events(response)) if stream else await response.json()
        usage, goes_on = conversation.read(answer)
        usages.append(usage)
        room = max_tokens - usage.prompt_tokens - usage.sampled_tokens
    return usages


async def _events(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    """Returns the events of a stream."""
    lines = (await response.read()).split(b"\n")
    return [msgspec.json.decode(line[6:]) for line in lines if line.startswith(b"data: {")]


def main() -> None:
    given = json.loads(sys.argv[1])
    print(json.dumps(uvloop.run(talk(**given)).json()))


if __name__ == "__main__":
    main()
