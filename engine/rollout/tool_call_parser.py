"""Incremental parser of tool calls in model output (hermes JSON). Pure: text in, calls out.

Invariants
- The calls and their order do not depend on how the text is cut into deltas.
- A call comes out at the delta that completes its closing tag, as a completely decoded JSON object or as malformed.
- A closing tag inside a JSON string does not close the call; a call that is never closed is never executed.
- A malformed call spoils no other. If an unbalanced quote hides its closing tag, the call ends there all the same,
  unless the quote hides more than HIDDEN tags: for each of them the text after it is read again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HIDDEN = 64
DEEPEST = 100  # levels of objects and lists, so that recursive code can walk a call on any stack
_IN_BODY, _IN_STRING = re.compile('["<]'), re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A decoded call: a non-empty name and an object of arguments, at most DEEPEST deep and writable as UTF-8 JSON."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class MalformedCall:
    """A call that could not be decoded, and the reason that the model is told."""

    text: str
    reason: str


class ToolCallParser:
    """Parses one assistant turn.

    >>> parser = ToolCallParser()
    >>> parser.feed('I compute. <tool_call>{"name": "python", "argum')
    []
    >>> parser.feed('ents": {"code": "print(1)"}}</tool_call> and')
    [ToolCall(name='python', arguments={'code': 'print(1)'})]
    >>> parser.finish()
    []
    """

    __slots__ = ("_body", "_escaped", "_in_string", "_outside", "_tag")

    def __init__(self) -> None:
        self._outside = ""  # tail that may be the beginning of an opening tag
        self._body: list[str] | None = None  # text since the opening tag
        self._in_string = False
        self._escaped = False
        self._tag = ""  # tail of the body that may be the beginning of the closing tag

    def feed(self, text: str) -> list[ToolCall | MalformedCall]:
        """Returns the calls that this text completes."""
        calls: list[ToolCall | MalformedCall] = []
        while text:
            if self._body is None:
                text = self._search(text)
            else:
                body, text = self._collect(text)
                if body is None:
                    break
                call = _decode(body)
                if isinstance(call, MalformedCall) and 0 < body.count(CLOSE) <= HIDDEN:
                    body, _, rest = body.partition(CLOSE)
                    call, text = _decode(body), rest + CLOSE + text
                calls.append(call)
        return calls

    def finish(self) -> list[ToolCall | MalformedCall]:
        """Ends the turn. Returns an unclosed call, as malformed, and calls that an unbalanced quote has hidden."""
        calls: list[ToolCall | MalformedCall] = []
        while self._body is not None:
            body = "".join(self._body)
            self._body = None
            inner, tag, rest = body.partition(CLOSE) if body.count(CLOSE) <= HIDDEN else (body, "", "")
            calls.append(_decode(inner) if tag else MalformedCall(text=inner, reason="tool call not closed"))
            calls += self.feed(rest)
        self._reset()
        return calls

    def _search(self, text: str) -> str:
        """Looks for the opening tag, outside a call. Returns the text after it."""
        text = self._outside + text
        at = text.find(OPEN)
        if at < 0:
            tail = text[text.rfind("<") :] if "<" in text else ""
            self._outside = tail if OPEN.startswith(tail) else ""
            return ""
        self._reset()
        self._body = []
        return text[at + len(OPEN) :]

    def _collect(self, text: str) -> tuple[str | None, str]:
        """Looks for the closing tag, inside a call and outside a JSON string. Returns the call's body, or None if the
        tag has not come, and the text after it.
        """
        assert self._body is not None
        at = 0
        while at < len(text):
            if self._tag:
                self._tag += text[at]
                if self._tag == CLOSE:
                    body = "".join(self._body) + text[: at + 1]
                    self._reset()
                    return body[: -len(CLOSE)], text[at + 1 :]
                if CLOSE.startswith(self._tag):
                    at += 1
                else:
                    self._tag = ""  # this character may begin a string or another tag
            elif self._escaped:
                self._escaped = False
                at += 1
            elif self._in_string:
                inside = _IN_STRING.match(text, at)
                assert inside is not None
                at = inside.end() + 1
                if at <= len(text):  # text[at - 1] is the closing quote, or a backslash that ends the text
                    self._in_string = self._escaped = text[at - 1] != '"'
            else:
                mark = _IN_BODY.search(text, at)
                if mark is None:
                    break
                at = mark.end()
                self._in_string = mark[0] == '"'
                self._tag = "" if self._in_string else "<"
        self._body.append(text)
        return None, ""

    def _reset(self) -> None:
        self._outside, self._body, self._tag = "", None, ""
        self._in_string = self._escaped = False


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list) else 0


def _decode(body: str) -> ToolCall | MalformedCall:
    try:
        call = json.loads(body, parse_constant=_refuse)
        _STRICT.encode(call).encode()  # refuses half a surrogate pair, and 1e999
        if body.count("{") + body.count("[") > DEEPEST and _depth(call) > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} deep")
    except (ValueError, RecursionError) as error:
        return MalformedCall(text=body, reason=getattr(error, "msg", str(error)))
    if not isinstance(call, dict):
        return MalformedCall(text=body, reason="a call must be a JSON object")
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not name:
        return MalformedCall(text=body, reason="'name' must be a non-empty string")
    if not isinstance(arguments, dict):
        return MalformedCall(text=body, reason="'arguments' must be an object")
    return ToolCall(name=name, arguments=arguments)
