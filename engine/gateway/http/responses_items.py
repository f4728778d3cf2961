"""The input items of OpenAI's Responses API as messages in the form of chat completions. Pure.

A turn of the model is one message there and several items here: its text, and each of its calls.

Invariants
- The items of a response come back as the message that they were made of.
- Thoughts (items of type reasoning) are passed over: we never send any, so they are another model's.
- The time is linear in the size of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.gateway.http.responses_tools import arguments_of, shown_name
from engine.gateway.requests import BadRequest

ROLES = ("user", "assistant", "system", "developer")
PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""The field of a part of a message that holds its text, by the part's type."""

Find = Callable[[str], Mapping[str, Any] | None]
"""Returns the item with an id, None if it is not kept."""


def messages_of(items: str | Sequence[Any], find: Find) -> list[dict[str, Any]]:
    """Returns the messages that the items make up.

    find: looks up an item that a client names instead of sending it. Raises BadRequest naming the item.

    >>> messages_of("hi", lambda item_id: None)
    [{'role': 'user', 'content': 'hi'}]
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    texts: list[list[str]] = []  # of each message, joined at the end
    for at, item in enumerate(items):
        where = f"input[{at}]"
        message = _message(_looked_up(item, find, where), where)
        if message is None:
            continue
        if messages and _is_one_turn(messages[-1], message):
            texts[-1].append(message["content"])
            if "tool_calls" in message:
                messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
            texts.append([message["content"]])
    for message, parts in zip(messages, texts, strict=True):
        message["content"] = "".join(parts)
    return messages


def _is_one_turn(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Returns whether two messages are parts of one turn: a turn may have calls beside its text, but not two texts."""
    both = last["role"] == message["role"] == "assistant"
    return both and ("tool_calls" in last or "tool_calls" in message)


def _looked_up(item: Any, find: Find, where: str) -> Mapping[str, Any]:
    """Returns an item, or the one that it refers to."""
    if not isinstance(item, dict):
        raise BadRequest(where, f"must be an object, got {item!r}")
    kind = item.get("type")
    if kind != "item_reference" and (kind is not None or "role" in item or "id" not in item):
        return item
    item_id = item.get("id")
    kept = find(item_id) if isinstance(item_id, str) else None
    if kept is None:
        raise BadRequest(where, f"Item with id {item_id!r} not found. Fix: send the item itself")
    return kept


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Returns an item as a message; None if it is passed over."""
    kind = item.get("type") or ("message" if "role" in item else None)
    match kind:
        case "message":
            role = item.get("role")
            if role not in ROLES:
                raise BadRequest(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {role!r}")
            return {"role": role, "content": _text(item.get("content"), f"{where}.content")}
        case "function_call":
            return _called(item, item.get("arguments"), where)
        case "custom_tool_call":
            text = item.get("input")
            if not isinstance(text, str):
                raise BadRequest(f"{where}.input", f"must be text, got {text!r}")
            return _called(item, arguments_of(text), where)
        case "function_call_output" | "custom_tool_call_output":
            return {
                "role": "tool",
                "content": _text(item.get("output"), f"{where}.output"),
                "tool_call_id": _string(item, "call_id", where),
                "is_error": bool(item.get("is_error", False)),
            }
        case "reasoning":
            return None
    raise BadRequest(where, f"items of type {kind!r} are not supported")


def _called(item: Mapping[str, Any], arguments: Any, where: str) -> dict[str, Any]:
    """Returns a call as the message of an assistant that makes it."""
    if not isinstance(arguments, str):
        raise BadRequest(f"{where}.arguments", f"must be text, got {arguments!r}")
    function = {"name": shown_name(item.get("namespace"), _string(item, "name", where)), "arguments": arguments}
    call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{where}.{name}", f"must be a string, got {value!r}")
    return value


def _text(content: Any, where: str) -> str:
    """Returns the text of a string, or of parts that are all text. Raises BadRequest for other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(where, f"must be text or a list of parts, got {content!r}")
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(PARTS[kind]) if isinstance(kind, str) and kind in PARTS else None
        if not isinstance(text, str):
            raise BadRequest(f"{where}[{at}]", f"only text parts are supported, got {kind!r}")
        texts.append(text)
    return "".join(texts)
