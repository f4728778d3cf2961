"""A conversation in each form in which a client may have it. Pure: answers go in, bodies of requests come out.

chat       OpenAI's chat completions: each request has the whole conversation
responses  OpenAI's Responses API: each request has the whole conversation, as items
continued  the Responses API: a request names the response before it, and has only what is new
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from bench.benches.gateway.script import FUNCTION, Usage, reply
from engine.types import Prompt

Api = Literal["chat", "responses", "continued"]


class Chat:
    """A conversation of chat completions."""

    path: ClassVar = "/v1/chat/completions"

    def __init__(self, prompt: Prompt, *, model: str, tools: bool, stream: bool) -> None:
        self._messages: list[dict[str, Any]] = [dict(message) for message in prompt.messages]
        self._asked: dict[str, Any] = {"model": model, "temperature": 1.0, "stream": stream}
        if tools:
            self._asked["tools"] = [{"type": "function", "function": FUNCTION}]
        if stream:
            self._asked["stream_options"] = {"include_usage": True}

    def body(self, room: int) -> dict[str, Any]:
        """Returns the next request. room: the most tokens of its answer."""
        return {**self._asked, "messages": self._messages, "max_tokens": room}

    def read(self, answer: dict[str, Any]) -> tuple[Usage, bool]:
        """Adds an answer and the replies of its calls. Returns its usage, and whether the conversation goes on."""
        message, usage = answer["choices"][0]["message"], answer["usage"]
        calls = message.get("tool_calls") or []
        self._messages.append({"role": "assistant", "content": message.get("content") or ""})
        if calls:
            self._messages[-1]["tool_calls"] = calls
        for call in calls:
            text = reply(call["function"]["arguments"])
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Usage(usage["prompt_tokens"], usage["completion_tokens"], cached), bool(calls)

    @staticmethod
    def joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns the events of a stream as one answer."""
        content, calls, usage = "", dict[int, dict[str, Any]](), dict[str, Any]()
        for event in events:
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                content += choice["delta"].get("content") or ""
                for piece in choice["delta"].get("tool_calls") or ():
                    empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                    call = calls.setdefault(piece["index"], empty)
                    call["id"] += piece.get("id") or ""
                    for name in ("name", "arguments"):
                        call["function"][name] += piece.get("function", {}).get(name) or ""
        message = {"content": content, "tool_calls": [calls[index] for index in sorted(calls)]}
        return {"choices": [{"message": message}], "usage": usage}


class Responses:
    """A conversation of the Responses API. continued: whether a request names the response before it."""

    path: ClassVar = "/v1/responses"

    def __init__(self, prompt: Prompt, *, model: str, tools: bool, stream: bool, continued: bool = False) -> None:
        self._items: list[dict[str, Any]] = [dict(message) for message in prompt.messages]
        self._asked: dict[str, Any] = {"model": model, "temperature": 1.0, "stream": stream, "store": continued}
        if tools:
            self._asked["tools"] = [{"type": "function", **FUNCTION}]

    def body(self, room: int) -> dict[str, Any]:
        """Returns the next request. room: the most tokens of its answer."""
        return {**self._asked, "input": self._items, "max_output_tokens": room}

    def read(self, answer: dict[str, Any]) -> tuple[Usage, bool]:
        """Adds an answer and the replies of its calls. Returns its usage, and whether the conversation goes on."""
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        if self._asked["store"]:
            self._asked["previous_response_id"] = answer["id"]
            self._items = []
        else:
            self._items += answer["output"]
        for call in calls:
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": reply(call["arguments"])}
            self._items.append(output)
        usage = answer["usage"]
        cached = (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0
        return Usage(usage["input_tokens"], usage["output_tokens"], cached), bool(calls)

    @staticmethod
    def joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns the answer that the last event of a stream has."""
        answer: dict[str, Any] = events[-1]["response"]
        return answer


def begun(prompt: Prompt, api: Api, *, model: str, tools: bool, stream: bool) -> Chat | Responses:
    """Returns a conversation that begins with a prompt."""
    if api == "chat":
        return Chat(prompt, model=model, tools=tools, stream=stream)
    return Responses(prompt, model=model, tools=tools, stream=stream, continued=api == "continued")
