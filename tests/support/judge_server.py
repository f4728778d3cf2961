"""An OpenAI-compatible server that answers as a judge does, or as one that is in trouble."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from aiohttp import web

HANG, CLOSE = object(), object()


class JudgeServer:
    """answers: for each request the next one: a text, a (status, headers, body), HANG or CLOSE; or a function of the
    question that gives one. The last one of a list stands for all that follow.
    """

    def __init__(self, *answers, tokens=10):
        self.answers, self.tokens = list(answers), tokens
        self.questions, self.keys = [], []
        self.running = self.most = 0
        self.gate = None

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request):
        question = (await request.json())["messages"][-1]["content"]
        self.questions.append(question)
        self.keys.append(request.headers.get("Authorization"))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.gate is not None:
                await self.gate.passed()
            return await self._respond(request, question)
        finally:
            self.running -= 1

    async def _respond(self, request, question):
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if callable(answer):
            answer = answer(question)
        if answer is HANG:
            await asyncio.Event().wait()
        if answer is CLOSE:
            request.transport.close()
            return web.Response()
        if isinstance(answer, tuple):
            status, headers, body = answer
            return web.Response(status=status, headers=headers, text=body, content_type="application/json")
        message = {"role": "assistant", "content": answer}
        return web.json_response(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": "judge",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": self.tokens - 1, "completion_tokens": 1, "total_tokens": self.tokens},
            }
        )
