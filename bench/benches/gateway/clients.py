"""Clients of a chat server in a process of their own: `python -m bench.benches.gateway.clients JSON`.

JSON: url, model, sessions (that talk at once), count of conversations, max_tokens of each, tools (whether the model is
shown one), stream, seed, and keyed (whether each conversation has a key of its own, by which the server knows it). One
JSON line at the end says what was counted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from typing import Any

import aiohttp
import uvloop

from bench.benches.gateway.script import MAX_TURNS, TOOL, Counted, conversations, reply
from engine.types import Prompt

PROMPT = 60  # most tokens of a question; the first answer tells how many it has


async def talk(
    url: str,
    model: str,
    *,
    sessions: int,
    count: int,
    max_tokens: int,
    tools: bool,
    stream: bool,
    seed: int,
    keyed: bool,
) -> Counted:
    """Has that many conversations, `sessions` of them at once."""
    pending = iter(conversations(count, seed))
    keys = itertools.count()
    usages: list[dict[str, Any]] = []
    connector = aiohttp.TCPConnector(limit=sessions)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def work() -> None:
            for prompt in pending:
                headers = {"Authorization": f"Bearer bench-{seed}-{next(keys)}"} if keyed else {}
                asked = {"model": model, "temperature": 1.0, "stream": stream}
                asked |= {"tools": [TOOL]} if tools else {}
                asked |= {"stream_options": {"include_usage": True}} if stream else {}
                usages.extend(await _conversation(http, url, prompt, asked, max_tokens=max_tokens, headers=headers))

        async with asyncio.TaskGroup() as tasks:
            for number in range(sessions):
                tasks.create_task(work(), name=f"client-{number}")
    return Counted(
        conversations=count,
        turns=len(usages),
        sampled_tokens=sum(usage["completion_tokens"] for usage in usages),
        prompt_tokens=sum(usage["prompt_tokens"] for usage in usages),
        cached_tokens=sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for usage in usages),
    )


async def _conversation(
    http: aiohttp.ClientSession,
    url: str,
    prompt: Prompt,
    asked: dict[str, Any],
    *,
    max_tokens: int,
    headers: dict[str, str],
) -> list[dict[str, Any]]:
    """Has a conversation and returns the usage of each turn. asked: what all its requests have."""
    messages: list[dict[str, Any]] = [dict(message) for message in prompt.messages]
    usages: list[dict[str, Any]] = []
    used = 0
    while len(usages) < MAX_TURNS and used < max_tokens:
        room = max_tokens - used if used else max_tokens - PROMPT
        request = {**asked, "messages": messages, "max_tokens": room}
        async with http.post(f"{url}/v1/chat/completions", json=request, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(f"{url} answers HTTP {response.status}: {(await response.text())[:500]}")
            message, usage = await (_streamed(response) if asked["stream"] else _whole(response))
        usages.append(usage)
        used = usage["total_tokens"]
        calls = message.get("tool_calls") or []
        messages.append({"role": "assistant", "content": message.get("content") or ""})
        if not calls:
            break
        messages[-1]["tool_calls"] = calls
        for call in calls:
            text = reply(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    return usages


async def _whole(response: aiohttp.ClientResponse) -> tuple[dict[str, Any], dict[str, Any]]:
    answer = await response.json()
    return answer["choices"][0]["message"], answer["usage"]


async def _streamed(response: aiohttp.ClientResponse) -> tuple[dict[str, Any], dict[str, Any]]:
    content, calls, usage = "", dict[int, dict[str, Any]](), dict[str, Any]()
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls") or ():
                empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                call = calls.setdefault(piece["index"], empty)
                call["id"] += piece.get("id") or ""
                for name in ("name", "arguments"):
                    call["function"][name] += piece.get("function", {}).get(name) or ""
    message: dict[str, Any] = {"content": content}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message, usage


def main() -> None:
    given = json.loads(sys.argv[1])
    print(json.dumps(uvloop.run(talk(**given)).json()))


if __name__ == "__main__":
    main()
