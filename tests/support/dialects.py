"""The dialects as a client speaks them, without a connection: bodies are JSON, and so is what comes back.

A conversation is a list of items that no dialect owns; an agent may continue it in either one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import msgspec

from engine.gateway.http import anthropic_api, openai_api, responses_api, responses_reply
from engine.gateway.kept_responses import KeptResponses
from engine.gateway.lineage import is_malformed, malformed_text
from engine.gateway.requests import ChatRequest, Finished
from engine.gateway.session import Session
from engine.rollout.chat_template import ChatTemplate

SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}


@dataclass(frozen=True, kw_only=True)
class Said:
    """A message of the agent: its system text, the user's, or one that it puts into the model's mouth."""

    role: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A turn as the client got it, and as it sends it back. calls: id, name, arguments."""

    finished: Finished
    thought: str
    text: str
    calls: tuple[tuple[str, str, str], ...] = ()

    @property
    def content(self) -> str:
        """The text with the malformed calls, which Anthropic's dialect cannot hold otherwise."""
        malformed = (malformed_text(name, arguments) for _, name, arguments in self.calls if broken(arguments))
        return self.text + "".join(malformed)

    @property
    def whole_calls(self) -> list[tuple[str, str, str]]:
        return [each for each in self.calls if not broken(each[2])]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a call, by the id that the client gives it."""

    call: str
    text: str


Item = Said | Reply | Result


def broken(arguments: str) -> bool:
    return is_malformed({"function": {"name": "python", "arguments": arguments}})


# What clients do to a turn before they send it back.
def as_it_came(reply: Reply) -> Reply:
    return reply


def without_thought(reply: Reply) -> Reply:
    return replace(reply, thought="")


def thought_in_text(reply: Reply) -> Reply:
    if not reply.thought:
        return reply
    return replace(reply, thought="", text=f"<think>\n\n{reply.thought}\n\n</think>\n\n\n{reply.text}")


def spaced(reply: Reply) -> Reply:
    return replace(reply, text=f"\n{reply.text}  ")


def spelled_anew(reply: Reply) -> Reply:
    return replace(reply, calls=tuple((call, name, _indented(arguments)) for call, name, arguments in reply.calls))


def _indented(arguments: str) -> str:
    return arguments if broken(arguments) else json.dumps(json.loads(arguments), indent=1)


HABITS = [as_it_came, without_thought, thought_in_text, spaced, spelled_anew]


class OpenAiDialect:
    tool: ClassVar = {
        "type": "function",
        "function": {"name": "python", "description": "Runs Python.", "parameters": SCHEMA},
    }

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat = chat

    def body(self, items: Sequence[Item], *, tools: bool, **options: object) -> bytes:
        messages = [self._message(item) for item in items]
        return json.dumps({"messages": messages, **({"tools": [self.tool]} if tools else {}), **options}).encode()

    def _message(self, item: Item) -> dict[str, object]:
        if isinstance(item, Said):
            return {"role": item.role, "content": item.text}
        if isinstance(item, Result):
            return {"role": "tool", "tool_call_id": item.call, "content": item.text}
        calls = [
            {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call, name, arguments in item.calls
        ]
        return {
            "role": "assistant",
            "content": item.text,
            **({"reasoning_content": item.thought} if item.thought else {}),
            **({"tool_calls": calls} if calls else {}),
        }

    def request(self, data: bytes) -> ChatRequest:
        [request] = openai_api.parse_chat(data).requests()
        return request

    async def ask(self, session: Session, data: bytes, *, stream: bool) -> Reply:
        answer = openai_api.Answer("tiny", self._chat, n=1, logprobs=False, token_ids=False)
        chunks, finished = await _events(session, self.request(data), partial(answer.event, 0), stream=stream)
        if not stream:
            message = json.loads(json.dumps(answer.whole([finished], [""])))["choices"][0]["message"]
            calls = [_openai_call(each) for each in message.get("tool_calls", ())]
            thought = message.get("reasoning_content", "")
            return Reply(finished=finished, thought=thought, text=message["content"] or "", calls=tuple(calls))
        thought, text, calls = "", "", []
        for chunk in chunks:
            for choice in json.loads(chunk.removeprefix(b"data: "))["choices"]:
                thought += choice["delta"].get("reasoning_content", "")
                text += choice["delta"].get("content", "")
                calls += [_openai_call(each) for each in choice["delta"].get("tool_calls", ())]
        return Reply(finished=finished, thought=thought, text=text, calls=tuple(calls))


class AnthropicDialect:
    tool: ClassVar = {"name": "python", "description": "Runs Python.", "input_schema": SCHEMA}

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat = chat

    def body(self, items: Sequence[Item], *, tools: bool, **options: object) -> bytes:
        messages: list[dict[str, object]] = []
        for item in items:
            role, blocks = self._blocks(item)
            last = messages[-1] if messages else {}
            if role == "user" and last.get("role") == "user" and last["content"][-1]["type"] == "tool_result":
                last["content"] += blocks  # as its clients do
            else:
                messages.append({"role": role, "content": blocks})
        body = {"max_tokens": 4000, "messages": messages, **({"tools": [self.tool]} if tools else {}), **options}
        return json.dumps(body).encode()

    def _blocks(self, item: Item) -> tuple[str, list[dict[str, object]]]:
        if isinstance(item, Said):
            return item.role, [{"type": "text", "text": item.text}]
        if isinstance(item, Result):
            return "user", [{"type": "tool_result", "tool_use_id": item.call, "content": item.text}]
        blocks: list[dict[str, object]] = []
        if item.thought:
            blocks.append({"type": "thinking", "thinking": item.thought, "signature": ""})
        if item.content:
            blocks.append({"type": "text", "text": item.content})
        for call, name, arguments in item.whole_calls:
            blocks.append({"type": "tool_use", "id": call, "name": name, "input": json.loads(arguments)})
        return "assistant", blocks

    def request(self, data: bytes) -> ChatRequest:
        return anthropic_api.parse(data).request()

    async def ask(self, session: Session, data: bytes, *, stream: bool) -> Reply:
        reply = anthropic_api.Reply("tiny")
        chunks, finished = await _events(session, self.request(data), reply.event, stream=stream)
        blocks = _streamed_blocks(chunks) if stream else reply.whole(finished)["content"]
        calls = [(each["id"], each["name"], json.dumps(each["input"])) for each in blocks if each["type"] == "tool_use"]
        thought = "".join(each["thinking"] for each in blocks if each["type"] == "thinking")
        text = "".join(each["text"] for each in blocks if each["type"] == "text")
        return Reply(finished=finished, thought=thought, text=text, calls=tuple(calls))


def _openai_call(call: dict[str, object]) -> tuple[str, str, str]:
    return call["id"], call["function"]["name"], call["function"]["arguments"]


class ResponsesDialect:
    """Thoughts do not come in this dialect, and an agent cannot send them back apart."""

    tool: ClassVar = {"type": "function", "name": "python", "description": "Runs Python.", "parameters": SCHEMA}

    def __init__(self, chat: ChatTemplate) -> None:
        self._kept = KeptResponses(1)

    def body(self, items: Sequence[Item], *, tools: bool, **options: object) -> bytes:
        options["max_output_tokens"] = options.pop("max_tokens", None)
        given = [each for item in items for each in self._items(item)]
        body = {"input": given, "store": False, **({"tools": [self.tool]} if tools else {}), **options}
        return json.dumps(body).encode()

    def _items(self, item: Item) -> list[dict[str, object]]:
        if isinstance(item, Said):
            return [{"type": "message", "role": item.role, "content": item.text}]
        if isinstance(item, Result):
            return [{"type": "function_call_output", "call_id": item.call, "output": item.text}]
        text = thought_in_text(item).text
        items: list[dict[str, object]] = []
        if text or not item.calls:
            part = {"type": "output_text", "text": text, "annotations": []}
            items.append({"type": "message", "role": "assistant", "content": [part]})
        for call, name, arguments in item.calls:
            items.append({"type": "function_call", "call_id": call, "name": name, "arguments": arguments})
        return items

    def request(self, data: bytes) -> ChatRequest:
        return responses_api.parse(data).request(self._kept)

    async def ask(self, session: Session, data: bytes, *, stream: bool) -> Reply:
        body = responses_api.parse(data)
        request = body.request(self._kept)
        reply = responses_reply.Reply("tiny", body, request, self._kept)
        chunks, finished = await _events(session, request, reply.event if stream else _nothing, stream=stream)
        if stream:
            [last] = [line for line in chunks[-1].split(b"\n") if line.startswith(b"data: ")][-1:]
            output = json.loads(last.removeprefix(b"data: "))["response"]["output"]
        else:
            output = json.loads(msgspec.json.encode(reply.whole(finished)))["output"]
        text = "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"])
        calls = [
            (each["call_id"], each["name"], each["arguments"]) for each in output if each["type"] == "function_call"
        ]
        thought = finished.message.get("reasoning_content", "")
        return Reply(finished=finished, thought=thought, text=text, calls=tuple(calls))


def _nothing(event: object) -> bytes:
    return b""


async def _events(session: Session, request: ChatRequest, encode, *, stream: bool) -> tuple[list[bytes], Finished]:
    chunks, finished = [], None
    async with aclosing(session.chat(request, stream=stream)) as events:
        async for event in events:
            chunks.append(encode(event))
            finished = event
    assert isinstance(finished, Finished)
    return [chunk for chunk in chunks if chunk], finished


def _streamed_blocks(chunks: Sequence[bytes]) -> list[dict[str, object]]:
    """The blocks of a stream, which has to begin and end each one before the next."""
    blocks, raw, open_block, ended = [], "", False, False
    for line in b"".join(chunks).split(b"\n"):
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        match event["type"]:
            case "content_block_start":
                assert (open_block, event["index"]) == (False, len(blocks))
                open_block, raw = True, ""
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                assert (open_block, event["index"]) == (True, len(blocks) - 1)
                delta = dict(event["delta"])
                kind = delta.pop("type")
                assert kind.removesuffix("_delta") in (blocks[-1]["type"], "input_json")
                raw += delta.get("partial_json", "")
                for name in ("text", "thinking"):
                    if name in delta:
                        blocks[-1][name] += delta[name]
            case "content_block_stop":
                assert open_block
                open_block = False
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads(raw)
            case "message_stop":
                ended = True
    assert ended
    assert not open_block
    return blocks


async def ask_and_leave(session: Session, request: ChatRequest) -> None:
    """Asks for a turn and goes away after its first event."""
    async with aclosing(session.chat(request, stream=True)) as events:
        await anext(events)
