"""Tool calls as data sets write them: a message's `tool_calls`, which a chat template renders.

Invariants
- In the text that a template makes of calls, a rollout finds the same calls in the same order.
- Fields that Arrow adds are left out: in a column of objects each row has the fields of all rows, null if it lacks one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.rollout.tool_call_parser import ToolCall, ToolCallParser


def normalize(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages as templates take them: contents are strings, arguments of calls are objects.

    A call without arguments, which some clients write as an empty text, gets an empty object. Raises ValueError naming
    message and field.

    >>> function = {"name": "python", "arguments": '{"code": "1"}'}
    >>> normalize([{"role": "assistant", "content": None, "tool_calls": [{"function": function}]}])[0]["content"]
    ''
    """
    normalized = []
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {at}: must be an object with a role, got {message!r}")
        calls = message.get("tool_calls") or ()
        if not isinstance(calls, list | tuple):
            raise ValueError(f"message {at}: tool_calls must be a list, got {calls!r}")
        content = message.get("content")
        if not isinstance(content, str) and (content is not None or not calls):
            raise ValueError(f"message {at}: content must be a string, got {content!r}")
        if content and not content.isascii() and content != content.encode(errors="replace").decode():
            # half a surrogate pair has no tokens
            raise ValueError(f"message {at}: content must be text, got {content!r}")
        if calls and message["role"] != "assistant":
            raise ValueError(f"message {at}: only role 'assistant' may have tool_calls, got {message['role']!r}")
        rest = {name: value for name, value in message.items() if name != "tool_calls" and value is not None}
        normalized.append({**rest, "content": content or ""})
        if calls:
            fields = (f"message {at}: tool_calls[{number}].function" for number in range(len(calls)))
            normalized[-1]["tool_calls"] = [
                _normalize_call(call, field) for call, field in zip(calls, fields, strict=True)
            ]
    return normalized


def without_nulls(value: Any) -> Any:
    """Returns the value without the fields that are null, at any depth; the elements of lists stay.

    >>> without_nulls({"city": None, "at": {"lat": 1, "lon": None}, "days": [1, None]})
    {'at': {'lat': 1}, 'days': [1, None]}
    """
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value


def decoded_arguments(text: str) -> Any:
    """Returns the arguments of a call from their JSON. Blank text stands for none.

    Raises ValueError or RecursionError.

    >>> decoded_arguments(""), decoded_arguments('{"a": null}')
    ({}, {'a': None})
    """
    return json.loads(text) if text.strip() else {}


def check_template_keeps_calls(text: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError unless the last message, which the template rendered as `text`, begins with its content and has
    exactly its calls.
    """
    parser, message = ToolCallParser(), messages[-1]
    read = [*parser.feed(text), *parser.finish()]
    calls = [ToolCall(**call["function"]) for call in message["tool_calls"]]
    if read != calls or not text.startswith(message["content"]):
        raise ValueError(
            f"message {len(messages) - 1}: the chat template renders content {message['content']!r} and tool_calls "
            f"{calls} as {text!r}, where a rollout reads {read}"
        )


def _normalize_call(call: Any, field: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f"{field} must be an object, got {function!r}")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{field}.name must be a non-empty string, got {name!r}")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = decoded_arguments(arguments)
    else:
        arguments = without_nulls(arguments)
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{field}.arguments must be an object or the JSON of one, got {arguments!r}")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
