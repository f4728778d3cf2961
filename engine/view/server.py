"""Serves the page over HTTP, to users of this machine only.

Invariants
- It listens on loopback. A request is answered only if it names a loopback host, so another site's name that resolves
  to 127.0.0.1 is refused. A request that starts something must come from the page itself.
- The page loads nothing from elsewhere: each answer tells the browser so.
- Answers are made in a thread, since they may take long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from engine.view.answers.tool_calls import CallPlace, call_of
from engine.view.answers.trajectories import NotThere
from engine.view.page import STATIC, plot_folder, served_page
from engine.view.programs import replay, reverify, rivals
from engine.view.questions import Questions
from engine.view.rerun import run_again
from engine.view.run_files import RunFiles
from sandbox import SandboxUnavailable
from sandbox.http.incoming import bodies_end, names_loopback
from sandbox.http.listener import Address, listening

COMPRESS = 1 << 16  # answers of at least this many bytes are compressed, which helps over an SSH tunnel
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Action = Callable[[RunFiles, dict[str, int]], Awaitable[dict[str, Any]]]


@asynccontextmanager
async def serve(questions: Questions, port: int, rocstar: Sequence[str]) -> AsyncIterator[str]:
    """Serves the page and yields its URL. port: 0 takes any free one. rocstar: see `make_app`.

    Raises NoPlots and `sandbox.http.listener.CannotListen`.
    """
    async with listening(make_app(questions, rocstar), Address(port=port)) as url:
        yield url


def make_app(questions: Questions, rocstar: Sequence[str]) -> web.Application:
    """Returns the page's application. rocstar: the command that buttons start for computations. Raises NoPlots."""
    app = web.Application(middlewares=[bodies_end, _guarded])
    answers = _Answers(questions, rocstar)
    app.add_routes(
        [
            web.get("/", _page),
            web.static("/static", STATIC),
            web.static("/plots", plot_folder()),
            web.get("/api/{name}", answers.get),
            web.post("/api/run-again", answers.run_again),
            web.post("/api/rivals", answers.rivals),
            web.post("/api/replay", answers.replay),
            web.post("/api/reverify", answers.reverify),
        ]
    )
    return app


@web.middleware
async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    if (refused := _refusal(request)) is not None:
        return _problem(403, refused)
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.headers.update(HEADERS)
        raise
    response.headers.update(HEADERS)
    return response


def _refusal(request: web.Request) -> str | None:
    if not names_loopback(request.headers.get("Host", "")):
        return "only 127.0.0.1 and localhost are served here"
    if request.method == "POST" and urlsplit(request.headers.get("Origin", "")).netloc != request.host:
        return "only the page itself may ask for this"
    return None


async def _page(request: web.Request) -> web.Response:
    return web.Response(text=served_page(), content_type="text/html")


class _Answers:
    def __init__(self, questions: Questions, rocstar: Sequence[str]) -> None:
        self._questions, self._rocstar = questions, rocstar

    async def get(self, request: web.Request) -> web.Response:
        name, query = request.match_info["name"], dict(request.query)
        try:
            content = await asyncio.to_thread(self._encoded, name, query)
        except NotThere as error:
            return _problem(404, str(error))
        except ValueError as error:
            return _problem(400, str(error))
        response = web.Response(body=content, content_type="application/json")
        if len(content) >= COMPRESS:
            response.enable_compression()
        return response

    async def run_again(self, request: web.Request) -> web.Response:
        async def run_call(run: RunFiles, values: dict[str, int]) -> dict[str, Any]:
            place = CallPlace(**{name: values[name] for name in ("step", "group", "sample", "call")})
            return await run_again(await asyncio.to_thread(call_of, run, place))

        return await self._do(request, run_call)

    async def rivals(self, request: web.Request) -> web.Response:
        return await self._do(request, lambda run, values: rivals(self._rocstar, run.path, values["step"]))

    async def reverify(self, request: web.Request) -> web.Response:
        return await self._do(
            request, lambda run, values: reverify(self._rocstar, run.path, values["step"], values["selection"])
        )

    async def replay(self, request: web.Request) -> web.Response:
        return await self._do(request, lambda run, values: replay(self._rocstar, run.path, values))

    async def _do(self, request: web.Request, action: Action) -> web.Response:
        try:
            values = msgspec.json.decode(await request.read(), type=dict[str, int])
            run = self._questions.run({"run": str(values["run"])})
            return web.Response(body=msgspec.json.encode(await action(run, values)), content_type="application/json")
        except (NotThere, SandboxUnavailable) as error:
            return _problem(404, str(error))
        except KeyError as error:
            return _problem(400, f"Bad request: {error.args[0]} is missing")
        except ValueError as error:
            return _problem(400, f"Bad request: {error}")

    def _encoded(self, name: str, query: dict[str, str]) -> bytes:
        return msgspec.json.encode(self._questions.answer(name, query), enc_hook=float)


def _problem(status: int, text: str) -> web.Response:
    return web.json_response({"problem": text}, status=status, headers=HEADERS)
