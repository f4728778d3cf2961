"""A model behind an OpenAI-compatible server, as one side of a conversation (`recipes.conversation`).

The server renders the conversation with its checkpoint's template and finds the calls in what the model says; they are
run here. With vLLM: `vllm serve CHECKPOINT --enable-auto-tool-choice --tool-call-parser hermes`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import openai
from openai import AsyncOpenAI

from engine.rollout.tool_call_parser import MalformedCall, ToolCall, ToolCallParser
from recipes.conversation import Said, Show

KEY = "OPENAI_API_KEY"
PARSES = "vllm serve ... --enable-auto-tool-choice --tool-call-parser hermes"


class EndpointFailed(RuntimeError):
    """The server cannot be talked to; the message says why and what to do, in one line.

    status: the HTTP answer's; None without an answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def of_one_request(self) -> bool:
        """Whether another request may succeed: this one was refused for its content, or the server failed once."""
        return self.status in (400, 413, 422) or (self.status is not None and self.status >= 500)


@dataclass(kw_only=True, slots=True)
class _Call:
    """A call whose pieces are still coming."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def parsed(self) -> ToolCall | MalformedCall:
        """Returns the call as a rollout would read it."""
        parser = ToolCallParser()
        text = f'<tool_call>{{"name": {json.dumps(self.name)}, "arguments": {self.arguments or "{}"}}}</tool_call>'
        return [*parser.feed(text), *parser.finish(), MalformedCall(text=text, reason="the call never ends")][0]

    def message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(kw_only=True)
class OnEndpoint:
    """Holds a conversation with the model of a server.

    tools: schemas (`engine.tools.python_tool.schema`); none: what the model calls is the server's business.
    max_tokens: bounds the whole conversation; None: what the server has room for. template_arguments: arguments of the
    server's chat template. stream: text is shown as it comes, at a cost for each piece of it. seed: seeds the first
    turn; the next ones count up from it.
    """

    client: AsyncOpenAI
    model: str
    tools: Sequence[Mapping[str, Any]]
    temperature: float
    max_tokens: int | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = True
    seed: int | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    used: int = 0
    """Tokens of the conversation so far, as the server counts them, without what the model has not read yet."""
    sampled: list[int] = field(default_factory=list)
    """Tokens of each turn that the model has sampled, as the server counts them."""
    trace: Mapping[str, Any] | None = None
    """How the last answer came about, from a server that runs the calls itself."""

    def hear_question(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def hear_replies(self, replies: list[str]) -> None:
        message = self.messages[-1]
        message["tool_calls"] = message["tool_calls"][: len(replies)]  # each call in a message must have a reply
        for call, reply in zip(message["tool_calls"], replies, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": reply})

    async def say(self, show: Show) -> Said:
        """Raises EndpointFailed."""
        if self.max_tokens is not None and self.used >= self.max_tokens:
            return Said(calls=[], whole=False)
        with explained(self.client):
            content, calls, finish = await (self._stream(show) if self.stream else self._at_once(show))
        parsed = [call.parsed() for call in calls]
        if self.tools and not calls and any(isinstance(call, ToolCall) for call in ToolCallParser().feed(content)):
            raise EndpointFailed(f"url: the server leaves calls in the text of an answer. Fix: {PARSES}")
        # The newline before a call is the template's to write.
        message = {"role": "assistant", "content": content.removesuffix("\n") if calls else content}
        self.messages.append(message | ({"tool_calls": [call.message() for call in calls]} if calls else {}))
        return Said(calls=parsed, whole=finish in ("stop", "tool_calls"))

    async def _stream(self, show: Show) -> tuple[str, list[_Call], str | None]:
        """Returns the text before the calls, the calls, and why the turn ended."""
        content, calls, finish = "", dict[int, _Call](), None
        self.sampled.append(0)
        async for chunk in await self.client.chat.completions.create(**self._request()):
            if chunk.usage is not None:
                self._count(chunk.usage)
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                content += choice.delta.content or ""
                show(choice.delta.content or "")
                for piece in choice.delta.tool_calls or ():
                    call = calls.setdefault(piece.index, _Call())
                    call.id += piece.id or ""
                    if piece.function is not None:
                        call.name += piece.function.name or ""
                        call.arguments += piece.function.arguments or ""
                        show(f"\n{piece.function.name} " if piece.function.name else "")
                        show(piece.function.arguments or "")
        return content, [calls[index] for index in sorted(calls)], finish

    async def _at_once(self, show: Show) -> tuple[str, list[_Call], str | None]:
        """Returns what `_stream` does, without showing it piece by piece."""
        self.sampled.append(0)
        completion = await self.client.chat.completions.create(**self._request())
        choice = completion.choices[0]
        self.trace = (choice.model_extra or {}).get("trace")
        if completion.usage is not None:
            self._count(completion.usage)
        content = choice.message.content or ""
        show(content)
        calls = [
            _Call(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in choice.message.tool_calls or ()
        ]
        return content, calls, choice.finish_reason

    def _count(self, usage: Any) -> None:
        self.used = usage.total_tokens
        self.sampled[-1] = usage.completion_tokens

    def _request(self) -> dict[str, Any]:
        request: dict[str, Any] = {
            "model": self.model,
            "messages": self.messages,
            "temperature": self.temperature,
            "stream": self.stream,
        }
        if self.tools:
            request["tools"] = self.tools
        if self.stream:
            request["stream_options"] = {"include_usage": True}
        if self.seed is not None:
            request["seed"] = self.seed + len(self.sampled) - 1
        if self.max_tokens is not None:
            request["max_tokens"] = self.max_tokens - self.used
        if self.template_arguments:
            request["extra_body"] = {"chat_template_kwargs": dict(self.template_arguments)}
        return request


def check_url(url: str) -> None:
    """Raises ValueError."""
    if not url.startswith(("http://", "https://")) or not urlsplit(url).netloc:
        raise ValueError(f"url must begin with http:// or https:// and name a server, got {url!r}")


def connect(url: str) -> AsyncOpenAI:
    """Returns a client.

    url: address of the server, or of its API; a bare address means /v1. The key is the environment's.
    """
    base = url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1"
    return AsyncOpenAI(base_url=base, api_key=os.environ.get(KEY) or "none")


async def model_of(client: AsyncOpenAI, name: str) -> str:
    """Returns the name; where it is empty, that of the only model.

    Raises EndpointFailed where the server has no such.
    """
    with explained(client):
        served = [model.id async for model in client.models.list()]
    if name in served or (not name and len(served) == 1):
        return name or served[0]
    raise EndpointFailed(f"model: {client.base_url} has no {name!r}. Fix: give one of {', '.join(served)}")


@contextmanager
def explained(client: AsyncOpenAI) -> Iterator[None]:
    """Turns the errors of a request into EndpointFailed."""
    try:
        yield
    except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
        cause = f"{client.base_url} refuses the key (HTTP {error.status_code})"
        raise EndpointFailed(f"url: {cause}. Fix: set {KEY} in the environment", error.status_code) from error
    except openai.APIConnectionError as error:
        cause = f"{client.base_url} does not answer ({error.__cause__ or error})"
        raise EndpointFailed(f"url: {cause}. Fix: start a server there ({PARSES}), or give its url") from error
    except openai.OpenAIError as error:
        status = getattr(error, "status_code", None)
        raise EndpointFailed(f"url: {client.base_url} answers: {' '.join(str(error).split())}", status) from error
