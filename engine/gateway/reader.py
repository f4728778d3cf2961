"""What a client reads of a turn while it is sampled: its text without the calls, each call once it is whole. Pure.

Invariants
- The pieces of text and the calls do not depend on how the tokens are cut into deltas.
- A client never sees the beginning of a tag or of a stop text, nor the end-of-turn token.
- Calls that cannot be decoded are given with their arguments as they were sampled where they have a name; a turn with
  none that has one gives its text whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace

from engine.gateway.lineage import CalledTool, is_malformed
from engine.gateway.requests import Call, Event, Text
from engine.replica.port import Delta
from engine.rollout.chat_template import ChatTemplate, Message
from engine.rollout.tool_call_parser import OPEN, MalformedCall, ToolCall, ToolCallParser

_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')


class TurnReader:
    """One per turn. seed: what the ids of its calls come from. calls: tools are offered; else all is text."""

    def __init__(self, chat: ChatTemplate, seed: str, *, calls: bool, stops: Sequence[str] = ()) -> None:
        self.stop: str | None = None
        """The stop text that ended the turn."""
        self.calls: list[Call] = []
        self.called: list[CalledTool] = []
        """Also those that no client gets."""
        self._chat = chat
        self._seed = seed
        self._stops = stops
        self._marks = (*stops, OPEN) if calls else tuple(stops)
        self._parser = ToolCallParser() if calls else None
        self._stream = chat.stream()
        self._ids: list[int] = []
        self._end_token = False
        self._text = ""  # decoded so far, up to a stop text
        self._sent = 0
        self._opened: int | None = None  # where the first call begins

    def read(self, delta: Delta, now: float) -> tuple[Delta, list[Event]]:
        """The delta, up to the token that completes a stop text, and what the client gets of it."""
        kept = len(delta.token_ids)
        self._end_token = delta.finish == "stop"
        before = len(self._text)
        content = delta.token_ids[:-1] if self._end_token else delta.token_ids
        if self._stops:
            for at, token in enumerate(content):
                self._text += self._stream.step([token])
                if self._stopped(before):
                    kept = at + 1
                    delta = replace(
                        delta, token_ids=delta.token_ids[:kept], logprobs=delta.logprobs[:kept], finish="stop"
                    )
                    self._end_token = False
                    break
        elif content:
            self._text += self._stream.step(content)
        self._ids += delta.token_ids
        return delta, self._events(before, delta, now)

    def finish(self, now: float) -> list[Event]:
        """The turn has ended: what was held back."""
        ids = self._ids[:-1] if self._end_token else self._ids
        before = len(self._text)
        if self.stop is None:
            self._text = self._chat.decode(ids)
        events: list[Event] = []
        if self._parser is not None:
            left = [*self._parser.feed(self._text[before:]), *self._parser.finish()]
            events += [call for each in left for call in self._call(each, now)]
            if self._opened is None and OPEN in self._text:
                self._opened = self._text.index(OPEN)
        end = len(self._text) if not self.calls or self._opened is None else self._opened
        text = self._text[self._sent : end]
        if self.calls:
            text = text.rstrip()
        if text:
            self._sent += len(text)
            events.insert(0, Text(text=text, token_ids=(), logprobs=()))
        return events

    @property
    def whole(self) -> str:
        """All that was sampled."""
        return self._chat.decode(self._ids)

    def message(self) -> Message:
        """What the client is expected to send back."""
        message: dict[str, object] = {"role": "assistant", "content": self._text[: self._sent]}
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message

    def _stopped(self, before: int) -> bool:
        """Whether a stop text is there now; the text is cut before the first one."""
        found = [(self._text.find(stop, max(0, before - len(stop))), stop) for stop in self._stops]
        found = [(at, stop) for at, stop in found if at >= 0]
        if not found:
            return False
        at, self.stop = min(found, key=lambda each: each[0])
        self._text = self._text[:at]
        return True

    def _events(self, before: int, delta: Delta, now: float) -> list[Event]:
        calls: list[Event] = []
        if self._parser is not None:
            calls = [call for each in self._parser.feed(self._text[before:]) for call in self._call(each, now)]
            if self._opened is None:
                at = self._text.find(OPEN, max(0, before - len(OPEN)))
                self._opened = at if at >= 0 else None
        end = self._visible()
        text = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return [Text(text=text, token_ids=tuple(delta.token_ids), logprobs=tuple(delta.logprobs)), *calls]

    def _visible(self) -> int:
        """Up to where the client may read: not the beginning of a mark, nor white space that may come before a call."""
        text = self._text
        if self._opened is not None:
            end = self._opened
        else:
            held = max((_overlap(text, mark) for mark in self._marks), default=0) if self.stop is None else 0
            end = len(text) - held
        return len(text[:end].rstrip()) if self._parser is not None else end

    def _call(self, found: ToolCall | MalformedCall, now: float) -> list[Call]:
        """The call as the client gets it, if it does."""
        if isinstance(found, ToolCall):
            name, arguments = found.name, json.dumps(found.arguments)
            malformed = is_malformed({"function": {"name": name, "arguments": arguments}})  # NaN, say
        else:
            named = _NAME.search(found.text)
            name, arguments, malformed = named[1] if named else "", _raw_arguments(found.text), True
        index = len(self.calls)
        digest = hashlib.blake2b(f"{self._seed}/{index}".encode(), digest_size=12).hexdigest()
        call_id = f"call_{digest}" if name else None
        self.called.append(
            CalledTool(
                id=call_id,
                name=name,
                arguments="{}" if malformed else arguments,
                closed_at=now,
                outcome="malformed" if malformed else None,
                reply=f"FormatError: {found.reason}" if isinstance(found, MalformedCall) else "",
            )
        )
        if call_id is None:
            return []
        self.calls.append(Call(index=index, id=call_id, name=name, arguments=arguments))
        return self.calls[-1:]


def _raw_arguments(text: str) -> str:
    """What stands in the place of the arguments.

    >>> _raw_arguments('{"name": "f", "arguments": {"a": }}')
    '{"a": }'
    """
    found = _ARGUMENTS.search(text)
    if found is None:
        return text
    rest = text[found.end() :].strip()
    return rest.removesuffix("}").strip()


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of the text may begin the mark."""
    most = min(len(text), len(mark) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(mark[:size])), 0)
