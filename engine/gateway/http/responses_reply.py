"""The answer to a request of OpenAI's Responses API, whole or as a stream of events.

Invariants
- The events come in OpenAI's order, with sequence numbers from 0: each item is added, filled and done before the next
  one is added, and one event that ends the response is the last.
- The last event of a stream holds the response that the same turn has as a whole.
- The ids of an item are the same in all events, and no two items share one.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from engine.gateway.http.errors import Problem
from engine.gateway.http.responses_api import ResponsesBody
from engine.gateway.kept_responses import KeptResponses
from engine.gateway.requests import Begun, Call, ChatRequest, Event, Finished, Text
from engine.gateway.tool_loop import Answer as AgentAnswer

FAILURES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""The code of a failed response, by the status that its error would have had."""


class Reply:
    """The response to one request.

    model: the name that the client is told. request: what the body became. kept: gets the response when it is
    complete, unless the client asked for store=false.
    """

    def __init__(self, model: str, body: ResponsesBody, request: ChatRequest, kept: KeptResponses) -> None:
        self._key = uuid.uuid4().hex
        self.id = f"resp_{self._key}"
        self._body = body
        self._request = request
        self._kept = kept
        self._head = msgspec.json.encode(self._told(model))[:-1]
        self._numbers = itertools.count()  # of events
        self._items: list[dict[str, Any]] = []  # the output so far, without the open message
        self._texts: list[str] | None = None  # of the open message
        self._open_place = b""  # the id and the index of the open message, as members of an event
        self._begun = False

    def whole(self, finished: Finished) -> msgspec.Raw:
        """Returns a turn as one response."""
        calls = finished.message.get("tool_calls", ())
        text = finished.message["content"]
        if text or not calls:
            done = finished.reason != "length" or bool(calls)
            self._items.append(self._message(text, "completed" if done else "incomplete"))
        for call in calls:
            self._items.append(self._body.offered.item(call, self._item_id("fc")))
        return msgspec.Raw(self._ended(finished, usage_of(finished)))

    def of_agent(self, answer: AgentAnswer) -> msgspec.Raw:
        """Returns the answer of the whole agent, with its trace."""
        status = "completed" if answer.finished.reason != "length" else "incomplete"
        self._items.append(self._message(answer.finished.message["content"], status))
        return msgspec.Raw(self._ended(answer.finished, _usage_of_agent(answer), trace=answer.trace))

    async def as_stream(self, answer: AgentAnswer) -> AsyncGenerator[bytes, None]:
        """Yields the answer of the whole agent as a stream."""
        yield self._begin()
        yield self._text(answer.finished.message["content"])
        yield self._end(answer.finished, _usage_of_agent(answer), trace=answer.trace)

    def event(self, event: Event) -> bytes:
        """Returns the stream's form of an event; b"" if it has none."""
        match event:
            case Begun():
                return self._begin()
            case Text():
                return self._text(event.text) if event.text else b""
            case Call():
                return self._close("completed") + self._call(event)
            case Finished():
                return self._end(event, usage_of(event))

    def failed(self, problem: Problem) -> bytes:
        """Returns the end of a stream that failed. It is the only form of an error that all clients read there."""
        code = problem.code or FAILURES.get(problem.status, "server_error")
        error = {"code": code, "message": problem.message}
        begin = b"" if self._begun else self._begin()
        return begin + self._lifecycle("response.failed", self._response("failed", self._items, error=error))

    def _told(self, model: str) -> dict[str, Any]:
        """Returns the fields that are the same in all states of the response."""
        body = self._body
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "service_tier": "default",
            "store": body.store,
            "temperature": body.others.get("temperature"),
            "text": {"format": {"type": "text"}, **body.text},
            "tool_choice": body.tool_choice,
            "tools": body.tools,
            "top_p": body.others.get("top_p"),
            "truncation": "disabled",
        }

    def _response(self, status: str, items: list[dict[str, Any]], **more: Any) -> bytes:
        """Returns the response in one of its states."""
        return b"%b,%b" % (self._head, _state(status, items, **more))

    def _ended(self, finished: Finished, usage: dict[str, Any], **more: Any) -> bytes:
        """Returns the complete response, and keeps it."""
        self._keep(finished)
        if self._body.others.get("return_token_ids"):
            more["prompt_token_ids"] = finished.prompt_ids
            more["token_ids"] = finished.token_ids
            more["token_logprobs"] = finished.logprobs
        more["usage"] = usage
        if finished.reason == "length":
            details = {"reason": "max_output_tokens"}
            return self._response("incomplete", self._items, incomplete_details=details, **more)
        return self._response("completed", self._items, **more)

    def _keep(self, finished: Finished) -> None:
        if self._body.store:
            messages = self._request.messages[1 if self._body.instructions else 0 :]
            self._kept.add(self.id, (*messages, finished.message), self._items)

    def _begin(self) -> bytes:
        self._begun = True
        state = b"%b,%b" % (self._head, _IN_PROGRESS)
        return self._lifecycle("response.created", state) + self._lifecycle("response.in_progress", state)

    def _end(self, finished: Finished, usage: dict[str, Any], **more: Any) -> bytes:
        cut = finished.reason == "length"
        opening = b"" if self._items or self._texts is not None else self._open()
        closing = self._close("incomplete" if cut else "completed")
        ended = self._ended(finished, usage, **more)
        return opening + closing + self._lifecycle(f"response.{'incomplete' if cut else 'completed'}", ended)

    def _text(self, text: str) -> bytes:
        opening = self._open() if self._texts is None else b""
        assert self._texts is not None
        self._texts.append(text)
        delta = b'%b,"content_index":0,"delta":%b,"logprobs":[]}' % (self._open_place, msgspec.json.encode(text))
        return opening + self._event("response.output_text.delta", delta)

    def _open(self) -> bytes:
        """Begins a message."""
        self._texts = []
        item = {**self._message("", "in_progress"), "content": []}
        self._open_place = _members(self._place("msg"))[:-1]
        added = self._added(item)
        part = b'%b,"content_index":0,"part":%b}' % (self._open_place, _EMPTY_PART)
        return added + self._event("response.content_part.added", part)

    def _close(self, status: str) -> bytes:
        """Ends the open message, if there is one."""
        if self._texts is None:
            return b""
        text = "".join(self._texts)
        self._texts = None
        item = self._message(text, status)
        shown = b'%b,"content_index":0,"text":%b,"logprobs":[]}' % (self._open_place, msgspec.json.encode(text))
        part = b'%b,"content_index":0,"part":%b}' % (self._open_place, msgspec.json.encode(item["content"][0]))
        done = self._event("response.output_text.done", shown) + self._event("response.content_part.done", part)
        return done + self._done(item)

    def _call(self, call: Call) -> bytes:
        """Adds a call, whose arguments come as one piece."""
        function = {"name": call.name, "arguments": call.arguments}
        item = self._body.offered.item({"id": call.id, "function": function}, self._item_id("fc"))
        kind, argument = "response.function_call_arguments", "arguments"
        if item["type"] == "custom_tool_call":
            kind, argument = "response.custom_tool_call_input", "input"
        place = self._place("fc")
        added = self._added({**item, argument: "", "status": "in_progress"})
        delta = self._event(f"{kind}.delta", _members({**place, "delta": item[argument]}))
        done = self._event(f"{kind}.done", _members({**place, "name": item["name"], argument: item[argument]}))
        return added + delta + done + self._done(item)

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", _members({"output_index": len(self._items), "item": item}))

    def _done(self, item: dict[str, Any]) -> bytes:
        fields = _members({"output_index": len(self._items), "item": item})
        self._items.append(item)
        return self._event("response.output_item.done", fields)

    def _message(self, text: str, status: str) -> dict[str, Any]:
        head = {"id": self._item_id("msg"), "type": "message", "role": "assistant", "status": status}
        return {**head, "content": [_part(text)]}

    def _item_id(self, kind: str) -> str:
        """Returns the id of the next item."""
        return f"{kind}_{self._key}{len(self._items):03x}"

    def _place(self, kind: str) -> dict[str, Any]:
        """Returns the id and the index of the next item."""
        return {"item_id": self._item_id(kind), "output_index": len(self._items)}

    def _event(self, kind: str, members: bytes) -> bytes:
        """Returns an event. members: of its object in JSON, beside its type and number, with the closing brace."""
        name = kind.encode()
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b\n\n' % (name, name, next(self._numbers), members)

    def _lifecycle(self, kind: str, response: bytes) -> bytes:
        """Returns an event that holds the whole response."""
        return self._event(kind, b'"response":%b}' % response)


def usage_of(finished: Finished) -> dict[str, Any]:
    """Returns the usage of one turn, in tokens."""
    return _usage(len(finished.prompt_ids), finished.cached_tokens, len(finished.token_ids))


def _usage_of_agent(answer: AgentAnswer) -> dict[str, Any]:
    return _usage(answer.prompt_tokens, 0, answer.sampled_tokens)


def _usage(prompt_tokens: int, cached_tokens: int, sampled_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + sampled_tokens,
    }


def _state(status: str, items: list[dict[str, Any]], **more: Any) -> bytes:
    return _members(
        {"status": status, "output": items, "error": None, "incomplete_details": None, "usage": None, **more}
    )


def _members(fields: Mapping[str, Any]) -> bytes:
    """Returns an object in JSON without its opening brace."""
    return msgspec.json.encode(fields)[1:]


def _part(text: str) -> Mapping[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


_IN_PROGRESS = _state("in_progress", [])
_EMPTY_PART = msgspec.json.encode(_part(""))
