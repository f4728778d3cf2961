"""Anthropic's dialect: /v1/messages, answered whole or as a stream of events.

A field that `MessagesBody` does not have is refused by name, except for IGNORED fields, which change nothing here, and
empty ones.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any, ClassVar

import msgspec

from engine.gateway.http.bodies import decoded_object
from engine.gateway.http.constraints import anthropic_choice, anthropic_format, constraint_of
from engine.gateway.http.openai_api import (
    NOT_SUPPORTED,
    Share,
    Temperature,
    Tokens,
    check_stops,
    is_neutral,
    is_number,
)
from engine.gateway.lineage import is_malformed, malformed_text
from engine.gateway.requests import BadRequest, Begun, Call, ChatRequest, Event, Finished, SamplingOverrides, Text
from engine.gateway.system_messages import without_billing
from engine.gateway.tool_loop import Answer as AgentAnswer
from engine.rollout.chat_template import Message
from engine.rollout.tool_call_messages import decoded_arguments

IGNORED = (
    "metadata",
    "service_tier",
    "thinking",
    "context_management",
    "betas",
    "container",
    "cache_control",
    "cache_salt",
    "speed",
    "inference_geo",
    "diagnostics",
    "fallbacks",
    "fallback_credit_token",
    "billing_policy",
    "user_profile_id",
    "workspace_id",
    "anthropic_version",
    "anthropic_beta",
    "mm_payload",
    "return_mm_kwargs",
)
TOP_K = (-1, 0)  # what turns it off
THINKING = {"type": "thinking", "thinking": "", "signature": ""}
TEXT = {"type": "text", "text": ""}
STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


class ThreadUnsupported(BadRequest):
    """A request for a conversation that the server keeps. Anthropic's client then goes on without one."""

    DETAILS: ClassVar = {"error_code": "thread_unsupported_request"}

    def __init__(self) -> None:
        super().__init__("thread", "conversations are not kept here. Fix: send the whole conversation without thread")


class MessagesBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request for the next turn of a conversation."""

    messages: list[dict[str, Any]]
    max_tokens: Tokens
    model: str = ""
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    changes: dict[str, str] = {}
    """See `SamplingOverrides`. A client cannot set it."""

    def request(self) -> ChatRequest:
        """Returns the body as a request of the gateway. Raises BadRequest."""
        choice = anthropic_choice(self.tool_choice)
        messages: list[Message] = []
        if system := _system(self.system or "", "system"):
            messages.append({"role": "system", "content": system})
        for at, message in enumerate(self.messages):
            messages += _messages(message, f"messages[{at}]")
        if not messages:
            raise BadRequest("messages", "must have at least one message")
        tools = () if choice.mode == "none" else tuple(_tool(tool, at) for at, tool in enumerate(self.tools or ()))
        check_stops("stop_sequences", self.stop_sequences or ())
        overrides = SamplingOverrides(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=tuple(stop for stop in self.stop_sequences or () if stop),
            changes=self.changes,
        )
        constraint = constraint_of(choice, tools, anthropic_format(self.output_config))
        return ChatRequest(messages=tuple(messages), tools=tools, constraint=constraint, overrides=overrides)


def parse(data: bytes, **defaults: Any) -> MessagesBody:
    """Reads a body. defaults: values of fields that it may lack. Raises msgspec.ValidationError and BadRequest."""
    fields = defaults | decoded_object(data)
    changes: dict[str, str] = {}
    for name in [*fields]:
        value = fields[name]
        if name in MessagesBody.__struct_fields__ and name != "changes":
            if value is None and name != "messages":
                del fields[name]
            continue
        del fields[name]
        if name in IGNORED or value is None or is_neutral(value, TOP_K if name == "top_k" else ()):
            continue
        if name == "thread":
            raise ThreadUnsupported
        if name != "top_k" or not is_number(value):
            raise BadRequest(name, NOT_SUPPORTED)
        changes[name] = f"only {TOP_K[0]} is supported, got {value!r}"
    return msgspec.convert({**fields, "changes": changes}, MessagesBody)


def _messages(message: Mapping[str, Any], where: str) -> list[Message]:
    """Returns a message of blocks as messages in our form, in which each result of a tool is a message of its own."""
    role, content = message.get("role"), message.get("content")
    if role == "system":
        text = _system(content, f"{where}.content")
        return [{"role": role, "content": text}] if text else []
    if role not in ("user", "assistant"):
        raise BadRequest(f"{where}.role", f"must be user, assistant or system, got {role!r}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content", f"must be text or a list of blocks, got {content!r}")
    texts, thoughts, calls, results = [], [], [], []
    for at, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        place = f"{where}.content[{at}]"
        if kind == "text":
            texts.append(_text(block.get("text"), place))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block, place))
        elif kind == "tool_result" and role == "user":
            results.append(_result(block, place))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(_text(block.get("thinking") or "", place).encode(errors="replace").decode())
        elif kind != "redacted_thinking":  # another model's, since we never send any
            raise BadRequest(place, f"a {role}'s message cannot have a block of type {kind!r}")
    text = "".join(texts)
    if role == "assistant":
        thought = "".join(thoughts).strip()
        more = {"reasoning_content": thought} if thought else {}
        return [{"role": role, "content": text, **more, **({"tool_calls": calls} if calls else {})}]
    return [*results, *([{"role": role, "content": text}] if text or not results else [])]


def _call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
        raise BadRequest(place, "a tool_use block must have a name and an input, which is an object")
    function = {"name": block["name"], "arguments": json.dumps(block["input"])}
    return {"id": str(block.get("id", "")), "type": "function", "function": function}


def _result(block: Mapping[str, Any], place: str) -> Message:
    content = _text(block.get("content") or "", place)
    failed = bool(block.get("is_error", False))
    return {"role": "tool", "content": content, "tool_call_id": str(block.get("tool_use_id", "")), "is_error": failed}


def _system(content: Any, place: str) -> str:
    """Returns the text of a system message without Claude Code's billing header.

    That header differs from prompt to prompt, so no two prompts would share a prefix.
    """
    blocks = content if isinstance(content, list) else [content]
    return without_billing(_text(block, place) for block in blocks)


def _text(content: Any, place: str) -> str:
    """Returns the text of a string, or of blocks that are all text. Raises BadRequest for other blocks."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [content]
    for block in blocks:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, dict) else block
            raise BadRequest(place, f"only text is supported, got {kind!r}")
    return "".join(block["text"] for block in blocks)


def _tool(tool: Mapping[str, Any], at: int) -> dict[str, Any]:
    """Returns a tool's schema in OpenAI's form, which templates show. Raises BadRequest."""
    if tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        raise BadRequest(f"tools[{at}]", "must be a tool that the client runs, with a name and an input_schema")
    function = {
        "name": tool["name"],
        "description": tool.get("description", ""),
        "parameters": tool.get("input_schema", {"type": "object", "properties": {}}),
    }
    return {"type": "function", "function": function}


class Reply:
    """The response to one request. Calls whose arguments are no JSON object become text, as no block can hold them."""

    def __init__(self, model: str) -> None:
        self.id = f"msg_{uuid.uuid4().hex[:24]}"
        self._model = model
        self._blocks = 0
        self._open: str | None = None  # the type of the block that is being sent

    def whole(self, finished: Finished) -> dict[str, Any]:
        """Returns a turn as one response."""
        blocks: list[dict[str, Any]] = []
        if thought := finished.message.get("reasoning_content"):
            blocks.append({**THINKING, "thinking": thought})
        if finished.message["content"]:
            blocks.append({"type": "text", "text": finished.message["content"]})
        for call in finished.message.get("tool_calls", ()):
            blocks.append(_block(call))
        return {**self._head(), "content": blocks, **_stop(finished), "usage": _usage(finished)}

    def of_agent(self, answer: AgentAnswer) -> dict[str, Any]:
        """Returns the answer of the whole agent, with its trace."""
        return {**self.whole(answer.finished), "usage": _usage_of_agent(answer), "trace": answer.trace}

    async def as_stream(self, answer: AgentAnswer) -> AsyncGenerator[bytes, None]:
        """Yields the answer of the whole agent as a stream."""
        yield self._opening(answer.prompt_tokens, 0)
        message = answer.finished.message
        thought = message.get("reasoning_content", "")
        yield self.event(Text(text=message["content"], token_ids=(), logprobs=(), thought=thought))
        yield self._end(_stop(answer.finished), _usage_of_agent(answer), trace=answer.trace)

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._model}

    def _opening(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
        usage = _counted(prompt_tokens, cached_tokens, 0)
        return _event({"type": "message_start", "message": {**message, "usage": usage}})

    def event(self, event: Event) -> bytes:
        """Returns the stream's form of an event; b"" if it has none."""
        match event:
            case Begun():
                return self._opening(event.prompt_tokens, event.cached_tokens)
            case Text():
                return self._thought(event.thought) + self._text(event.text)
            case Call():
                function = {"name": event.name, "arguments": event.arguments}
                block = _block({"id": event.id, "function": function})
                if block["type"] == "text":
                    return self._text(block["text"])
                delta = {"type": "input_json_delta", "partial_json": event.arguments}
                return self._close() + self._start({**block, "input": {}}) + self._delta(delta) + self._close()
            case Finished():
                return self._end(_stop(event), _usage(event))

    def _end(self, stop: dict[str, Any], usage: dict[str, int], **more: Any) -> bytes:
        end = {"type": "message_delta", "delta": stop, "usage": usage, **more}
        return self._close() + _event(end) + _event({"type": "message_stop"})

    def _thought(self, thought: str) -> bytes:
        if not thought:
            return b""
        return self._into(THINKING) + self._delta({"type": "thinking_delta", "thinking": thought})

    def _text(self, text: str) -> bytes:
        if not text:
            return b""
        return self._into(TEXT) + self._delta({"type": "text_delta", "text": text})

    def _into(self, block: dict[str, Any]) -> bytes:
        """Begins a block unless one of its type is being sent."""
        return b"" if self._open == block["type"] else self._close() + self._start(block)

    def _start(self, block: dict[str, Any]) -> bytes:
        self._open = block["type"]
        return _event({"type": "content_block_start", "index": self._blocks, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._blocks += 1
        return _event({"type": "content_block_stop", "index": self._blocks - 1})


def _block(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if is_malformed(call):
        return {"type": "text", "text": malformed_text(function["name"], function["arguments"])}
    arguments = decoded_arguments(function["arguments"])
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def _stop(finished: Finished) -> dict[str, Any]:
    reason = "stop_sequence" if finished.stop is not None else STOPS[finished.reason]
    if reason == "tool_use" and all(map(is_malformed, finished.message.get("tool_calls", ()))):
        reason = "end_turn"  # all its calls became text
    return {"stop_reason": reason, "stop_sequence": finished.stop}


def _usage(finished: Finished) -> dict[str, int]:
    return _counted(len(finished.prompt_ids), finished.cached_tokens, len(finished.token_ids))


def _usage_of_agent(answer: AgentAnswer) -> dict[str, int]:
    return {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens}


def _counted(prompt_tokens: int, cached_tokens: int, sampled_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "output_tokens": sampled_tokens,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation_input_tokens": 0,
    }


def _event(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))
