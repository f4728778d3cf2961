"""OpenAI's dialect: /v1/chat/completions and /v1/completions.

The fields of `ChatBody` and `CompletionBody` are accepted. IGNORED fields, which clients send by habit, change nothing
here. A NEUTRAL field is accepted with a value that changes nothing, and an unknown one with an EMPTY value. A session
that samples by its own rules accepts an OVERRULED field too, and counts it by name. Every other field is refused by
name: a client that asks for something should not get something else.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from engine.gateway.http.bodies import decoded_object
from engine.gateway.http.constraints import constraint_of, openai_choice, openai_format
from engine.gateway.requests import (
    BadRequest,
    Begun,
    Call,
    ChatRequest,
    Event,
    Finished,
    SamplingOverrides,
    Text,
    TextRequest,
)
from engine.gateway.system_messages import is_billing, without_billing
from engine.gateway.tool_loop import Answer as AgentAnswer
from engine.replica.port import MOST_TOP, SEEDS
from engine.rollout.chat_template import ChatTemplate, Message
from engine.types import TokenScores

IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "cache_salt",
    "request_id",
    "session_id",
    "priority",
    "prediction",
    "parallel_tool_calls",
    "reasoning_effort",
    "include_reasoning",
    "verbosity",
    "stream_interval",
    "truncation_side",  # of `truncate_prompt_tokens`, which is refused
    "media_io_kwargs",
    "mm_processor_kwargs",
    "mm_payload",
    "return_mm_kwargs",
    "return_token_offsets",
)
OVERRULED = ("presence_penalty", "frequency_penalty", "repetition_penalty", "top_k", "min_p")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "response_format": ({"type": "text"},),
    "function_call": ("none", "auto"),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "best_of": (1,),
    "suffix": ("",),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True, False),  # the end-of-turn token never reaches a client
    "spaces_between_special_tokens": (True, False),
    "add_generation_prompt": (True,),
    "detokenize": (True,),
}
EMPTY: tuple[Any, ...] = (False, {}, [])  # a field that is switched off, whether known or not
NOT_SUPPORTED = "this field is not supported"
MOST_CHOICES = 256  # in one request
MOST_STOPS, STOP_CHARS = 32, 256
N = Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES)]
Tokens = Annotated[int, msgspec.Meta(ge=1)]
Seed = Annotated[int, msgspec.Meta(ge=-SEEDS, le=SEEDS - 1)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: N = 1
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    max_tokens: Tokens | None = None
    stop: str | list[str] | None = None
    return_token_ids: bool = False
    changes: dict[str, str] = {}
    """See `SamplingOverrides`. A client cannot set it."""

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def overrides(self, sample: int, max_tokens: int | None) -> SamplingOverrides:
        """Returns how a sample of the request is sampled. Raises BadRequest."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        check_stops("stop", stops)
        return SamplingOverrides(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=None if self.seed is None else (self.seed + sample) % SEEDS,
            stop=tuple(stop for stop in stops if stop),
            changes=self.changes,
        )


class ChatBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """A request for the next turn of a conversation."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"add_special_tokens": (False,)}
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None

    def requests(self) -> list[ChatRequest]:
        """Returns a request for each of the n samples. Raises BadRequest."""
        if not self.messages:
            raise BadRequest("messages", "must have at least one message")
        messages = tuple(message_of(each, at) for at, each in enumerate(self.messages) if not _is_billing(each))
        choice = openai_choice(self.tool_choice, parallel=self.parallel_tool_calls)
        tools = () if choice.mode == "none" else tuple(_tool(each, at) for at, each in enumerate(self.tools or ()))
        constraint = constraint_of(choice, tools, openai_format(self.response_format))
        limit = self.max_completion_tokens or self.max_tokens
        return [
            ChatRequest(messages=messages, tools=tools, constraint=constraint, overrides=self.overrides(n, limit))
            for n in range(self.n)
        ]


class CompletionBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """A request to continue texts or tokens."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"add_special_tokens": (True,)}
    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=1)] | None = None
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOP)] | None = None
    """vLLM's: also the log-probabilities of the prompt's tokens, and of so many likeliest ones in their places."""

    def requests(self, chat: ChatTemplate) -> list[TextRequest]:
        """Returns n requests for each prompt. Raises BadRequest."""
        if not self.prompt:
            raise BadRequest("prompt", "must not be empty")
        if self.prompt_logprobs is not None and self.stream:
            raise BadRequest("prompt_logprobs", "must be left out of a request that streams")
        kinds = {type(each) for each in self.prompt}
        if len(kinds) > 1:
            raise BadRequest("prompt", "must be text, a list of texts, token ids, or a list of token ids")
        prompts: Sequence[Any] = [self.prompt] if isinstance(self.prompt, str) or kinds == {int} else self.prompt
        if len(prompts) * self.n > MOST_CHOICES:
            raise BadRequest("n", f"prompts x n must be at most {MOST_CHOICES}, got {len(prompts)} x {self.n}")
        limit = self.max_tokens or 16  # the API's default
        return [
            TextRequest(
                prompt_ids=tuple(chat.encode(prompt) if isinstance(prompt, str) else prompt),
                overrides=self.overrides(sample, limit),
            )
            for prompt in prompts
            for sample in range(self.n)
        ]


def parse_chat(data: bytes) -> ChatBody:
    """Reads the body of a chat request. Raises msgspec.DecodeError and BadRequest."""
    return chat_of(decoded_object(data))


def chat_of(fields: dict[str, Any]) -> ChatBody:
    """Returns these fields as the body of a chat request. Raises msgspec.ValidationError and BadRequest."""
    return _body_of(fields, ChatBody)


def parse_completion(data: bytes) -> CompletionBody:
    """Reads the body of a completion request. Raises msgspec.DecodeError and BadRequest."""
    return _body_of(decoded_object(data), CompletionBody)


def _body_of(fields: dict[str, Any], body: type[Any]) -> Any:
    neutral = {**NEUTRAL, **body.NEUTRAL}
    changes: dict[str, str] = {}
    for name in [*fields]:
        value = fields[name]
        if name in body.__struct_fields__ and name != "changes":
            if value is None and name not in ("messages", "prompt"):
                del fields[name]  # clients write null for a field that they leave out
            continue
        del fields[name]
        if name in IGNORED or value is None or is_neutral(value, neutral.get(name, ())):
            continue
        refused = f"only {neutral[name][0]!r} is supported, got {value!r}" if name in neutral else NOT_SUPPORTED
        if name not in OVERRULED or not is_number(value):
            raise BadRequest(name, refused)
        changes[name] = refused
    return msgspec.convert({**fields, "changes": changes}, body)


def check_stops(field: str, stops: Sequence[str]) -> None:
    """Raises BadRequest for too many or too long stop texts, since each is searched for after each token."""
    if len(stops) > MOST_STOPS:
        raise BadRequest(field, f"must be at most {MOST_STOPS} texts, got {len(stops)}")
    longest = max(map(len, stops), default=0)
    if longest > STOP_CHARS:
        raise BadRequest(field, f"must have at most {STOP_CHARS} characters each, got {longest}")


def is_neutral(value: Any, neutral: Sequence[Any] = ()) -> bool:
    """Returns whether a field's value changes nothing: it is one of `neutral`, or empty and no switch that is on.

    >>> is_neutral(0, (0,)), is_neutral(0), is_neutral({}), is_neutral([1]), is_neutral(False, (True,))
    (True, False, True, False, False)
    """
    if value in neutral:
        return True
    return True not in neutral and any(type(value) is type(empty) and value == empty for empty in EMPTY)


def is_number(value: Any) -> bool:
    """Returns whether a value is a number of JSON.

    >>> is_number(1.5), is_number(True), is_number("1")
    (True, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool)


def message_of(message: dict[str, Any], at: int) -> Message:
    """Returns a message with its content as text. Raises BadRequest naming the message."""
    where = f"messages[{at}]"
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequest(f"{where}.role", f"must be system, developer, user, assistant or tool, got {role!r}")
    texts = _texts(message.get("content"), where)
    ours: dict[str, Any] = {"role": role, "content": without_billing(texts) if role == "system" else "".join(texts)}
    if role == "assistant":
        if message.get("tool_calls"):
            if not isinstance(message["tool_calls"], list):
                raise BadRequest(f"{where}.tool_calls", f"must be a list, got {message['tool_calls']!r}")
            ours["tool_calls"] = message["tool_calls"]
        thought = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thought, str) and thought.strip():
            ours["reasoning_content"] = thought.encode(errors="replace").decode()
    if role == "tool":
        ours["is_error"] = bool(message.get("is_error", False))
        ours["tool_call_id"] = message.get("tool_call_id")
    return ours


def _is_billing(message: dict[str, Any]) -> bool:
    """Returns whether nothing is left of a system message without the billing header."""
    if message.get("role") not in ("system", "developer"):
        return False
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    return is_billing([part.get("text") if isinstance(part, dict) else part for part in parts])


def _texts(content: Any, where: str) -> list[str]:
    if content is None or isinstance(content, str):
        return [content or ""]
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content", f"must be text or a list of parts, got {content!r}")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise BadRequest(f"{where}.content[{number}]", f"only text parts are supported, got {kind!r}")
        texts.append(text)
    return texts


def _tool(tool: dict[str, Any], at: int) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"tools[{at}]", "must be a function with a name")
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if name != "cache_control"},
    }


class Answer:
    """The response to one request, whole or as a stream. model: the name that the client is told."""

    kind = "chatcmpl"
    object = "chat.completion"

    def __init__(self, model: str, chat: ChatTemplate, *, n: int, logprobs: bool, token_ids: bool) -> None:
        self.id = f"{self.kind}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._model = model
        self._chat = chat
        self._n = n
        self._logprobs = logprobs
        self._token_ids = token_ids
        head = {"id": self.id, "object": f"{self.object}.chunk", "created": self.created, "model": model}
        self._head = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":[{"index":'

    def whole(self, choices: Sequence[Finished], shown: Sequence[str]) -> dict[str, Any]:
        """Returns the response as a whole. shown: the visible texts of plain completions."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self._model,
            "choices": [self._choice(index, each, shown[index]) for index, each in enumerate(choices)],
            "usage": usage(choices, self._n),
            **({"prompt_token_ids": choices[0].prompt_ids} if self._token_ids else {}),
        }

    def of_agent(self, answers: Sequence[AgentAnswer]) -> dict[str, Any]:
        """Returns answers of the whole agent, each with its trace. The usage counts all their turns."""
        whole = self.whole([answer.finished for answer in answers], [""] * len(answers))
        for choice, answer in zip(whole["choices"], answers, strict=True):
            choice["trace"] = answer.trace
        prompts = sum(answer.prompt_tokens for answer in answers)
        sampled = sum(answer.sampled_tokens for answer in answers)
        whole["usage"] = {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}
        return whole

    async def as_stream(self, whole: dict[str, Any], body: ChatBody) -> AsyncGenerator[bytes, None]:
        """Yields a complete response as a stream."""
        for choice in whole["choices"]:
            yield self.chunk(choice["index"], {"role": "assistant", "content": ""})
            message = choice["message"]
            if "reasoning_content" in message:
                yield self.chunk(choice["index"], {"reasoning_content": message["reasoning_content"]})
            yield self.chunk(choice["index"], {"content": message["content"]})
            yield self.chunk(choice["index"], {}, choice["finish_reason"], trace=choice["trace"])
        if body.include_usage:
            head = {key: whole[key] for key in ("id", "created", "model", "usage")}
            end = {**head, "object": f"{self.object}.chunk", "choices": []}
            yield b"data: " + msgspec.json.encode(end) + b"\n\n"
        yield DONE

    def _choice(self, index: int, finished: Finished, shown: str) -> dict[str, Any]:
        message = dict(finished.message)
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        return {
            "index": index,
            "message": message,
            "logprobs": self._content(finished.token_ids, finished.logprobs) if self._logprobs else None,
            "finish_reason": finished.reason,
            "stop_reason": finished.stop,
            **({"token_ids": finished.token_ids} if self._token_ids else {}),
        }

    def _content(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        return {
            "content": [
                {
                    "token": self._chat.decode([token]),
                    "logprob": value,
                    "bytes": [*self._chat.token_bytes(token)],
                    "top_logprobs": [],
                }
                for token, value in zip(token_ids, logprobs, strict=True)
            ],
            "refusal": None,
        }

    def chunk(self, index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        """Returns one event of the stream."""
        rest = {"delta": delta, "logprobs": None, "finish_reason": finish, **more}
        return b"%b%d,%b]}\n\n" % (self._head, index, msgspec.json.encode(rest)[1:])

    def event(self, index: int, event: Event) -> bytes:
        """Returns the stream's form of an event; b"" if it has none."""
        match event:
            case Begun():
                return self.chunk(index, {"role": "assistant", "content": ""})
            case Text():
                more: dict[str, Any] = {}
                if self._token_ids:
                    more["token_ids"] = event.token_ids
                if self._logprobs and event.token_ids:
                    more["logprobs"] = self._content(event.token_ids, event.logprobs)
                delta = {"reasoning_content": event.thought} if event.thought else {}
                if event.text or not event.thought:
                    delta["content"] = event.text
                return self.chunk(index, delta, **more) if event.text or event.thought or more else b""
            case Call():
                function = {"name": event.name, "arguments": event.arguments}
                call = {"index": event.index, "id": event.id, "type": "function", "function": function}
                return self.chunk(index, {"tool_calls": [call]})
            case Finished():
                return self.chunk(index, {}, event.reason, stop_reason=event.stop)

    def usage_chunk(self, choices: Sequence[Finished]) -> bytes:
        """Returns the last event of the stream, which a client may ask for."""
        head = {"id": self.id, "object": f"{self.object}.chunk", "created": self.created, "model": self._model}
        return b"data: " + msgspec.json.encode({**head, "choices": [], "usage": usage(choices, self._n)}) + b"\n\n"


class TextAnswer(Answer):
    """The response to a request for a plain completion."""

    kind = "cmpl"
    object = "text_completion"

    def __init__(self, model: str, chat: ChatTemplate, *, n: int, logprobs: bool, token_ids: bool) -> None:
        super().__init__(model, chat, n=n, logprobs=logprobs, token_ids=token_ids)
        self._head = self._head.replace(b".chunk", b"")
        self.prompts: list[list[dict[str, Any] | None]] = []
        """The log-probabilities of each prompt, by `prompt_logprobs`; empty if nobody asked."""

    def prompt_logprobs(self, token_ids: Sequence[int], scores: TokenScores) -> list[dict[str, Any] | None]:
        """Returns the scores of all tokens but the first in vLLM's form: {id: entry} for each, None for the first.

        The token's own entry has a rank only if it is among the likeliest ones.
        """
        ids_TK, logprobs_TK = scores.top_TK
        rows: list[dict[str, Any] | None] = [None]
        columns = zip(token_ids[1:], scores.logprobs_T.tolist(), ids_TK.tolist(), logprobs_TK.tolist(), strict=True)
        for token, own, likeliest, logprobs in columns:
            row = {str(token): self._entry(token, own, None)}
            ranked = enumerate(zip(likeliest, logprobs, strict=True), 1)
            row |= {str(other): self._entry(other, value, rank) for rank, (other, value) in ranked}
            rows.append(row)
        return rows

    def _entry(self, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self._chat.decode([token])}

    def _choice(self, index: int, finished: Finished, shown: str) -> dict[str, Any]:
        return {
            "index": index,
            "text": shown,
            "logprobs": self._content(finished.token_ids, finished.logprobs) if self._logprobs else None,
            "finish_reason": "length" if finished.reason == "length" else "stop",
            "stop_reason": finished.stop,
            **({"token_ids": finished.token_ids} if self._token_ids else {}),
            **({"prompt_logprobs": self.prompts[index // self._n]} if self.prompts else {}),
        }

    def _content(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        tokens = [self._chat.decode([token]) for token in token_ids]
        return {"tokens": tokens, "token_logprobs": [*logprobs], "top_logprobs": None, "text_offset": []}

    def chunk(self, index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        rest = {"text": delta.get("content", ""), "logprobs": None, "finish_reason": finish, **more}
        return b"%b%d,%b]}\n\n" % (self._head, index, msgspec.json.encode(rest)[1:])

    def event(self, index: int, event: Event) -> bytes:
        return b"" if isinstance(event, Begun) else super().event(index, event)


DONE: Literal[b"data: [DONE]\n\n"] = b"data: [DONE]\n\n"


def usage(choices: Sequence[Finished], n: int) -> dict[str, Any]:
    """Returns the usage of all choices. n: how many consecutive choices share a prompt."""
    prompts = sum(len(each.prompt_ids) for each in choices[::n])
    sampled = sum(len(each.token_ids) for each in choices)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": sampled,
        "total_tokens": prompts + sampled,
        "prompt_tokens_details": {"cached_tokens": max(each.cached_tokens for each in choices)},
    }
