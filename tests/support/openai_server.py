"""An OpenAI-compatible server with scripted answers, for the side that talks to one."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

from aiohttp import web

KEY = "sk-right"
USAGE = {"prompt_tokens": 60, "completion_tokens": 40, "total_tokens": 100}


class Server:
    """`async with Server([chunk, ...], ...).running() as server`: each request gets the next turn's chunks.

    A chunk is a delta of a message, or the reason why the turn ends. HANG: sends nothing more. DIE: the connection
    breaks off. key: what requests must give; None: any. failure: HTTP status and message of each request for an answer;
    a turn may be such a pair too. trace: of each answer that does not stream.
    """

    HANG = object()
    DIE = object()

    def __init__(self, *turns, model="served", key=None, failure=None, trace=None):
        self.turns, self.model, self.key, self.failure, self.trace = list(turns), model, key, failure, trace
        self.requests = []

    @asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    def _refusal(self, request):
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, "invalid api key")
        return None

    async def _models(self, request):
        return self._refusal(request) or web.json_response({"object": "list", "data": [{"id": self.model}]})

    async def _answer(self, request):
        if refusal := self._refusal(request):
            return refusal
        if self.failure is not None:
            return _error(*self.failure)
        self.requests.append(await request.json())
        turn = self.turns.pop(0)
        if isinstance(turn, tuple):
            return _error(*turn)
        if not self.requests[-1].get("stream"):
            return await self._at_once(request, turn)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in turn:
            if chunk is self.HANG:
                await asyncio.Event().wait()
            if chunk is self.DIE:
                request.transport.abort()
                return response
            ends = isinstance(chunk, str)
            choice = {"index": 0, "delta": {} if ends else chunk, "finish_reason": chunk if ends else None}
            await response.write(_event([choice]))
        await response.write(_event([], USAGE) + b"data: [DONE]\n\n")
        return response

    async def _at_once(self, request, turn):
        """What the chunks of the turn make together."""
        message, calls, finish = {"role": "assistant", "content": ""}, {}, None
        for chunk in turn:
            if chunk is self.HANG:
                await asyncio.Event().wait()
            elif chunk is self.DIE:
                request.transport.abort()
            elif isinstance(chunk, str):
                finish = chunk
            else:
                message["content"] += chunk.get("content", "")
                for piece in chunk.get("tool_calls", ()):
                    whole = calls.setdefault(piece["index"], {"type": "function", "function": {"arguments": ""}})
                    whole |= {"id": piece["id"]} if "id" in piece else {}
                    for name, text in piece["function"].items():
                        whole["function"][name] = whole["function"].get(name, "") + text
        if calls:
            message["tool_calls"] = [calls[at] for at in sorted(calls)]
        choice = {"index": 0, "message": message, "finish_reason": finish}
        if self.trace is not None:
            choice["trace"] = self.trace
        whole = {"id": "1", "object": "chat.completion", "created": 0, "model": "served", "choices": [choice]}
        return web.json_response(whole | {"usage": USAGE})


def call(code, *, name="python", at=0):
    """The chunks of a call of `code`."""
    return raw_call(json.dumps({"code": code}), name=name, at=at)


def raw_call(arguments, *, name="python", at=0):
    """The chunks of a call with arguments as they are, cut as vLLM cuts them: first the name, then pieces of these."""
    pieces = [{"index": at, "id": f"call-{name}-{at}", "type": "function", "function": {"name": name}}]
    pieces += [{"index": at, "function": {"arguments": piece}} for piece in (arguments[:7], arguments[7:])]
    return [{"tool_calls": [piece]} for piece in pieces]


def _event(choices, usage=None):
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "served", "choices": choices}
    return b"data: " + json.dumps(chunk | ({"usage": usage} if usage else {})).encode() + b"\n\n"


def _error(status, message):
    return web.json_response({"error": {"message": message, "type": "error", "code": status}}, status=status)
