"""The gateway over HTTP: the paths of all dialects, at the root and under /sessions/{key}.

    async with serve(gateway, ServerConfig(model="tiny")) as address:
        client = AsyncOpenAI(base_url=f"{address}/sessions/mine/v1", api_key="none")

Invariants
- It listens on loopback, or with a token that every request must carry, and no web page can use it
  (`sandbox.http.listener`).
- An error has its dialect's form, also in the middle of a stream. A bug of ours is logged and answered with 500.
- Whatever a client sends is answered with a status below 500, unless something failed here.
- A client that goes away, or reads nothing of its stream for PATIENCE_S, ends its request, which frees the KV blocks. A
  client that stops in the middle of a request is disconnected (`sandbox.http.connections`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from engine.errors import first_error
from engine.gateway.gateway import Gateway
from engine.gateway.http import anthropic_api, openai_api, responses_api
from engine.gateway.http.errors import Dialect, Problem, Refused, UnknownModel, problem_of
from engine.gateway.http.metrics import Metrics
from engine.gateway.http.models import list_of, model_entry
from engine.gateway.http.responses_reply import Reply
from engine.gateway.kept_responses import WITHOUT_SESSION, KeptResponses
from engine.gateway.requests import BadRequest, Begun, Event, Finished, Text, TooLong
from engine.gateway.session import Session
from engine.gateway.tool_loop import ToolLoop
from sandbox.http.connections import PATIENCE_S, Connections
from sandbox.http.incoming import authorize, bodies_end, hear, read_body, token_of
from sandbox.http.listener import Address, listening

MAX_BODY = 8 << 20  # bytes of a request
SESSION_PREFIX = "session-"
"""An API key that begins with this names a session."""
SMALL = 1 << 15  # bytes: a transport has room for twice as many before it waits for the client
EXPIRE_S = 10.0  # between two checks for idle sessions
_REQUEST_ID = re.compile(r"[ -~]{1,128}")

Handler = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """model: the name of the model, which clients use and are told. also: other names that they may use."""

    model: str
    also: tuple[str, ...] = ()
    address: Address = Address()  # noqa: RUF009  frozen


@asynccontextmanager
async def serve(
    gateway: Gateway,
    config: ServerConfig,
    *,
    tool_loop: ToolLoop | None = None,
    connections: Connections | None = None,
) -> AsyncIterator[str]:
    """Serves the gateway and yields its URL, http://host:port.

    tool_loop: answers chats that bring no tools. connections: None for as many as there are descriptors. Raises
    `sandbox.http.listener.CannotListen`.
    """
    connections = connections or Connections.within_limits()
    app = make_app(gateway, config, tool_loop, connections)
    try:
        async with listening(app, config.address, connections) as url, asyncio.TaskGroup() as tasks:
            expiring = tasks.create_task(_expire(gateway), name="gateway-expire")
            try:
                yield url
            finally:
                expiring.cancel()
    finally:
        gateway.closing()


async def _expire(gateway: Gateway) -> None:
    while True:
        await asyncio.sleep(EXPIRE_S)
        gateway.expire()


def make_app(
    gateway: Gateway, config: ServerConfig, tool_loop: ToolLoop | None, connections: Connections
) -> web.Application:
    app = web.Application(middlewares=[hear(connections), bodies_end])
    app.on_response_prepare.append(_name_request)
    endpoints = Endpoints(gateway, config, tool_loop, connections)
    for prefix in ("", "/sessions/{session}"):
        app.router.add_get(f"{prefix}/v1/models", endpoints.answer(None, endpoints.models))
        app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", endpoints.answer(None, endpoints.model))
        app.router.add_post(f"{prefix}/v1/chat/completions", endpoints.answer("openai", endpoints.chat))
        app.router.add_post(f"{prefix}/v1/completions", endpoints.answer("openai", endpoints.completions))
        app.router.add_post(f"{prefix}/v1/responses", endpoints.answer("openai", endpoints.responses))
        app.router.add_post(f"{prefix}/v1/responses/input_tokens", endpoints.answer("openai", endpoints.count_input))
        app.router.add_post(f"{prefix}/v1/messages", endpoints.answer("anthropic", endpoints.messages))
        app.router.add_post(f"{prefix}/v1/messages/count_tokens", endpoints.answer("anthropic", endpoints.count))
    app.router.add_get("/sessions/{session}", endpoints.answer("openai", endpoints.cost))
    app.router.add_get("/health", endpoints.answer("openai", endpoints.health))
    app.router.add_get("/metrics", endpoints.answer("openai", endpoints.metrics))
    app.router.add_route("*", "/{anything:.*}", endpoints.answer("openai", endpoints.nothing))
    return app


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    """Gives each answer the id of its request, or a new one, by which logs can be searched."""
    given = request.headers.get("x-request-id", "")
    name = given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
    for header in ("x-request-id", "request-id"):  # where OpenAI's clients look for it, and Anthropic's
        response.headers[header] = name


class Endpoints:
    """The handlers of one gateway."""

    def __init__(
        self, gateway: Gateway, config: ServerConfig, tool_loop: ToolLoop | None, connections: Connections
    ) -> None:
        self._gateway = gateway
        self._tool_loop = tool_loop
        self._config = config
        self._connections = connections
        self._metrics = Metrics(gateway)
        self._responses = KeptResponses(WITHOUT_SESSION)

    def answer(
        self, dialect: Dialect | None, handler: Handler
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Returns a handler of aiohttp's. The given one gets the body too, and its errors get the dialect's form.

        dialect: None for the one that the request's headers tell.
        """

        async def answered(request: web.Request) -> web.StreamResponse:
            try:
                authorize(request, self._config.address.token)
                body = await read_body(request, self._connections, most=MAX_BODY)
                with self._connections.at_work(request.transport):
                    return await handler(request, bytes(body))
            except Exception as error:
                problem = _problem(error, "a request failed")
                self._note(request, problem)
                return problem.response(dialect or _dialect_of(request))

        return answered

    def _note(self, request: web.Request, problem: Problem) -> None:
        """Counts a refusal, in the request's session if it has one."""
        if 400 <= problem.status < 500:
            self._gateway.refuse(problem.message, problem.kind, self._found(request), fault=problem.fault)

    @contextmanager
    def _session(self, request: web.Request) -> Iterator[Session]:
        """Yields the session that the request names, or a new one for this request alone.

        A session that the request began, and in which no turn was finished, ends with it.
        """
        key = _named_session(request)
        if key is None:
            session = self._gateway.alone()
            try:
                yield session
            finally:
                session.close()
            return
        try:
            session = self._gateway.session(key)
        except KeyError:
            raise Refused(404, f"there is no session {key!r}") from None
        session.users += 1
        try:
            yield session
        finally:
            session.users -= 1
            self._gateway.close_unused(key)

    def _found(self, request: web.Request) -> Session | None:
        """Returns the open session that the request names; None if there is none."""
        key = _named_session(request)
        return None if key is None else self._gateway.find(key)

    def _check_model(self, request: web.Request, model: str) -> None:
        """Raises Refused for an unknown model.

        In training any name means the session's model: an agent may have several names for parts of its work.
        """
        if not model or model == self._config.model or model in self._config.also:
            return
        session = self._found(request)
        if session is None or not session.rules.fixed:
            raise UnknownModel(model, self._config.model)
        session.count_up(renamed=1)

    async def models(self, request: web.Request, data: bytes) -> web.Response:
        """GET /v1/models."""
        names = (self._config.model, *self._config.also)
        return _json(list_of([model_entry(name, self._room(request)) for name in names]))

    async def model(self, request: web.Request, data: bytes) -> web.Response:
        """GET /v1/models/{model}."""
        name = request.match_info["model"]
        self._check_model(request, name)
        return _json(model_entry(name, self._room(request)))

    def _room(self, request: web.Request) -> int | None:
        """Returns how many tokens a conversation may have; None if that depends on a session that is not named."""
        session = self._found(request)
        rules = self._gateway.config.rules if session is None else session.rules
        return None if rules is None else rules.max_tokens

    async def cost(self, request: web.Request, data: bytes) -> web.Response:
        """GET /sessions/{key}: what the session has used."""
        key = request.match_info["session"]
        if (session := self._gateway.find(key)) is None:
            raise Refused(404, f"there is no session {key!r}")
        return _json(session.cost)

    async def health(self, request: web.Request, data: bytes) -> web.Response:
        """GET /health: 503 while no replica serves."""
        fleet = self._gateway.fleet
        body = {"replicas": fleet.live, "weight_version": fleet.version, "sessions": len(self._gateway)}
        return _json(body, status=200 if fleet.live else 503)

    async def metrics(self, request: web.Request, data: bytes) -> web.Response:
        """Answers GET /metrics, for Prometheus."""
        return web.Response(body=self._metrics.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def nothing(self, request: web.Request, data: bytes) -> web.Response:
        raise Refused(404, f"there is no {request.method} {request.path}")

    async def chat(self, request: web.Request, data: bytes) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body = openai_api.parse_chat(data)
        self._check_model(request, body.model)
        answer = openai_api.Answer(
            self._config.model,
            self._gateway.chat,
            n=body.n,
            logprobs=bool(body.logprobs),
            token_ids=body.return_token_ids,
        )
        requests = body.requests()
        if self._tool_loop is not None and not body.tools:
            answers = await self._tool_loop.answer(requests[0], n=len(requests))
            whole = answer.of_agent(answers)
            if not body.stream:
                return _json(whole)
            return await _stream(request, answer.as_stream(whole, body), _openai_failed)
        with self._session(request) as session:
            turns = [session.chat(each, stream=body.stream) for each in requests]
            return await self._openai(request, turns, answer, body)

    async def completions(self, request: web.Request, data: bytes) -> web.StreamResponse:
        """POST /v1/completions."""
        body = openai_api.parse_completion(data)
        self._check_model(request, body.model)
        answer = openai_api.TextAnswer(
            self._config.model,
            self._gateway.chat,
            n=body.n,
            logprobs=body.logprobs is not None,
            token_ids=body.return_token_ids,
        )
        requests = body.requests(self._gateway.chat)
        if body.prompt_logprobs is not None:
            await self._score(answer, [each.prompt_ids for each in requests[:: body.n]], body.prompt_logprobs)
        with self._session(request) as session:
            turns = [session.complete(each, stream=body.stream) for each in requests]
            return await self._openai(request, turns, answer, body)

    async def _score(self, answer: openai_api.TextAnswer, prompts: Sequence[Sequence[int]], top: int) -> None:
        """Gives the answer the log-probabilities of prompts. Raises BadRequest for one that a replica refuses."""
        try:
            async with asyncio.TaskGroup() as scoring:
                tasks = [
                    scoring.create_task(self._gateway.fleet.score(ids, 1, top), name=f"prompt-{number}")
                    for number, ids in enumerate(prompts)
                ]
        except ExceptionGroup as errors:
            error = first_error(errors)
            raise BadRequest("prompt", str(error)) if isinstance(error, ValueError) else error from errors
        answer.prompts = [  # in a thread: each token is decoded, of which there may be many thousands
            await asyncio.to_thread(answer.prompt_logprobs, ids, task.result())
            for ids, task in zip(prompts, tasks, strict=True)
        ]

    async def _openai(
        self,
        request: web.Request,
        turns: Sequence[AsyncGenerator[Event, None]],
        answer: openai_api.Answer,
        body: openai_api.ChatBody | openai_api.CompletionBody,
    ) -> web.StreamResponse:
        finished: dict[int, Finished] = {}
        if not body.stream:
            shown = [""] * len(turns)
            async with aclosing(_merged(turns)) as events:
                async for index, event in events:
                    if isinstance(event, Finished):
                        finished[index] = event
                    elif isinstance(event, Text):
                        shown[index] += event.text
            return _json(answer.whole([finished[index] for index in range(len(turns))], shown))

        async def chunks() -> AsyncGenerator[bytes, None]:
            joined = b""  # a write costs more than all else of a chunk, so the beginning comes with the first tokens
            async with aclosing(_merged(turns)) as events:
                async for index, event in events:
                    joined += answer.event(index, event)
                    if isinstance(event, Finished):
                        finished[index] = event
                    if not isinstance(event, Begun) and len(finished) < len(turns):
                        yield joined
                        joined = b""
            if body.include_usage:
                joined += answer.usage_chunk([finished[index] for index in range(len(turns))])
            yield Last(joined + openai_api.DONE)

        return await _stream(request, chunks(), _openai_failed)

    async def responses(self, request: web.Request, data: bytes) -> web.StreamResponse:
        """POST /v1/responses."""
        body = responses_api.parse(data)
        self._check_model(request, body.model)
        for kind in body.offered.left_out:
            self._gateway.leave_out(kind)
        if self._tool_loop is not None and not body.offered.functions:
            asked = body.request(self._responses)
            [answer] = await self._tool_loop.answer(asked)
            reply = Reply(self._config.model, body, asked, self._responses)
            if not body.stream:
                return _json(reply.of_agent(answer))
            return await _stream(request, reply.as_stream(answer), reply.failed)
        with self._session(request) as session:
            kept = self._kept(session)
            asked = body.request(kept)
            reply = Reply(self._config.model, body, asked, kept)
            turn = session.chat(asked, stream=body.stream)
            if not body.stream:
                async with aclosing(turn) as events:
                    [finished] = [event async for event in events if isinstance(event, Finished)]
                return _json(reply.whole(finished))

            async def chunks() -> AsyncGenerator[bytes, None]:
                try:
                    async for chunk in _encoded(turn, reply.event):
                        yield chunk
                except TooLong as error:  # where it streams, Codex finds this error in the last event only
                    problem = _problem(error, "a response failed")
                    self._note(request, problem)
                    yield reply.failed(problem)

            return await _stream(request, chunks(), reply.failed)

    async def count_input(self, request: web.Request, data: bytes) -> web.Response:
        """POST /v1/responses/input_tokens."""
        body = responses_api.parse(data)
        self._check_model(request, body.model)
        session = self._found(request)
        tokens = self._gateway.count_tokens(body.request(self._kept(session)), session)
        return _json({"object": "response.input_tokens", "input_tokens": tokens})

    def _kept(self, session: Session | None) -> KeptResponses:
        """Returns the responses that a request may go on from: a session's, or those of requests without one."""
        return session.responses if session is not None and session.key else self._responses

    async def messages(self, request: web.Request, data: bytes) -> web.StreamResponse:
        """POST /v1/messages."""
        body = anthropic_api.parse(data)
        self._check_model(request, body.model)
        reply = anthropic_api.Reply(self._config.model)
        if self._tool_loop is not None and not body.tools:
            [answer] = await self._tool_loop.answer(body.request())
            if not body.stream:
                return _json(reply.of_agent(answer))
            return await _stream(request, reply.as_stream(answer), _anthropic_failed)
        with self._session(request) as session:
            turn = session.chat(body.request(), stream=body.stream)
            if not body.stream:
                async with aclosing(turn) as events:
                    [finished] = [event async for event in events if isinstance(event, Finished)]
                return _json(reply.whole(finished))

            return await _stream(request, _encoded(turn, reply.event), _anthropic_failed)

    async def count(self, request: web.Request, data: bytes) -> web.Response:
        """POST /v1/messages/count_tokens."""
        body = anthropic_api.parse(data, max_tokens=1)
        self._check_model(request, body.model)
        session = self._found(request)
        return _json({"input_tokens": self._gateway.count_tokens(body.request(), session)})


def _named_session(request: web.Request) -> str | None:
    """Returns the key of the session that the request names, by its path or as its API key; None if it names none."""
    if "session" in request.match_info:
        return request.match_info["session"]
    token = token_of(request.headers)
    return token if token.startswith(SESSION_PREFIX) else None


def _dialect_of(request: web.Request) -> Dialect:
    return "anthropic" if "anthropic-version" in request.headers else "openai"


def _openai_failed(problem: Problem) -> bytes:
    return b"data: " + msgspec.json.encode(problem.body("openai")) + b"\n\n" + openai_api.DONE


def _anthropic_failed(problem: Problem) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode(problem.body("anthropic")) + b"\n\n"


def _problem(error: Exception, failed: str) -> Problem:
    """Returns an exception as a problem. failed: the log's line if it is a bug of ours."""
    cause = first_error(error) if isinstance(error, ExceptionGroup) else error
    problem = problem_of(cause)
    if problem is None:
        log.error(failed, exc_info=error)
        problem = Problem(status=500, message="an error of the gateway; its log has more")
    return problem


class Last(bytes):
    """The last chunk of a stream, which is sent together with its end."""


async def _encoded(turn: AsyncGenerator[Event, None], encode: Callable[[Event], bytes]) -> AsyncGenerator[bytes, None]:
    """Yields the chunks of a turn. Its beginning comes with its first tokens, which saves a write."""
    begin = b""
    async with aclosing(turn) as events:
        async for event in events:
            chunk = begin + encode(event)
            if isinstance(event, Begun):
                begin = chunk
            else:
                begin = b""
                yield Last(chunk) if isinstance(event, Finished) else chunk


class _EventStream(web.StreamResponse):
    _send_headers_immediately = False  # they go out with the first chunk, as aiohttp does it for whole answers


async def _stream(
    request: web.Request, chunks: AsyncGenerator[bytes, None], failed: Callable[[Problem], bytes]
) -> web.StreamResponse:
    """Answers with server-sent events. A failure before the first one is an ordinary error."""
    async with aclosing(chunks):
        first = await anext(chunks)
        response = _EventStream(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        with suppress(ConnectionError, _NotTaken):  # the client has gone
            await response.prepare(request)
            transport = request.transport
            await _write(response, first, transport)
            try:
                async for chunk in chunks:
                    if chunk:
                        await _write(response, chunk, transport)
            except (ConnectionError, _NotTaken):
                raise
            except Exception as error:
                problem = _problem(error, "a request failed in the middle of its stream")
                await _write(response, failed(problem), transport)
            await response.write_eof()
        return response


class _NotTaken(Exception):
    """The client reads nothing of its stream."""


async def _write(response: web.StreamResponse, chunk: bytes, transport: asyncio.Transport | None) -> None:
    write = response.write_eof if isinstance(chunk, Last) else response.write
    if len(chunk) < SMALL and transport is not None and not transport.get_write_buffer_size():
        await write(chunk)  # it does not wait for the client, so there is no need for a timer
        return
    try:
        async with asyncio.timeout(PATIENCE_S):
            await write(chunk)
    except TimeoutError:
        response.force_close()
        raise _NotTaken from None


async def _merged(turns: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[tuple[int, Event], None]:
    """Yields the events of several turns as they come, each with the number of its turn.

    Raises the first error of a turn, and Refused if a turn was cut off with its session.
    """
    if len(turns) == 1:
        async with aclosing(turns[0]) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue()  # None: the turn is over

    async def follow(index: int, turn: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(turn) as events:
                async for event in events:
                    queue.put_nowait((index, event))
        except Exception as error:
            queue.put_nowait((index, error))
        finally:
            queue.put_nowait((index, None))

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(follow(index, turn), name=f"sample-{index}") for index, turn in enumerate(turns)]
        try:
            unfinished = set(range(len(turns)))
            while unfinished:
                index, sampled = await queue.get()
                if isinstance(sampled, Exception):
                    raise sampled
                if sampled is None:
                    if index in unfinished:
                        raise Refused(503, "the session has ended")
                    continue
                if isinstance(sampled, Finished):
                    unfinished.remove(index)
                yield index, sampled
        except GeneratorExit:  # closed early; the TaskGroup would wrap it in a group
            pass
        finally:
            for task in running:
                task.cancel()


def _json(body: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json", status=status)
