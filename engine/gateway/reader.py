"""Converts the tokens of a turn into what a client reads: its text without the calls, and each complete call. Pure.

Invariants
- The text and the calls do not depend on how the tokens are cut into deltas.
- A client never sees the beginning of a tag or of a stop text, nor the end-of-turn token.
- The thought with which a turn begins comes apart from the text.
- A call that cannot be decoded but has a name is passed on with its arguments as they were sampled. If no call of a
  turn has a name, the client gets the whole text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace

from engine.gateway.lineage import CalledTool, is_malformed
from engine.gateway.overlap import overlap
from engine.gateway.requests import Call, Event, Text
from engine.gateway.thoughts import ThoughtReader
from engine.replica.port import Delta
from engine.rollout.chat_template import ChatTemplate, Message
from engine.rollout.tool_call_parser import OPEN, MalformedCall, ToolCall, ToolCallParser

_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')


class TurnReader:
    """Reads one turn.

    seed: determines the ids of its calls. calls: whether tools are offered; if not, a call is text. thoughts: whether
    a thought is told apart from the text.
    """

    def __init__(
        self, chat: ChatTemplate, seed: str, *, calls: bool, stops: Sequence[str] = (), thoughts: bool = True
    ) -> None:
        self.stop: str | None = None
        """The stop text that ended the turn, if one did."""
        self.calls: list[Call] = []
        self.called: list[CalledTool] = []
        """All calls, also those that no client gets."""
        self._chat = chat
        self._seed = seed
        self._stops = stops
        self._marks = (*stops, OPEN) if calls else tuple(stops)
        self._parser = ToolCallParser() if calls else None
        self._thoughts = ThoughtReader(opened=chat.thoughts == "begun") if thoughts else None
        self._stream = chat.stream()
        self._ids: list[int] = []
        self._end_token = False
        self._text = ""  # decoded so far, up to a stop text
        self._sent = 0  # characters that the client has
        self._opened: int | None = None  # position at which the first call begins

    def read(self, delta: Delta, now: float) -> tuple[Delta, list[Event]]:
        """Returns the delta up to the token that completes a stop text, and the events for the client."""
        kept = len(delta.token_ids)
        self._end_token = delta.finish == "stop"
        before = len(self._text)
        content = delta.token_ids[:-1] if self._end_token else delta.token_ids
        if self._stops:
            for at, token in enumerate(content):
                self._text += self._stream.step([token])
                if self._stopped(before):
                    kept = at + 1
                    delta = replace(delta.up_to(kept), finish="stop")
                    self._end_token = False
                    break
        elif content:
            self._text += self._stream.step(content)
        self._ids += delta.token_ids
        return delta, self._events(before, delta, now)

    def finish(self, now: float) -> list[Event]:
        """Returns the events that were held back until the turn ended."""
        ids = self._ids[:-1] if self._end_token else self._ids
        before = len(self._text)
        if self.stop is None:
            self._text = self._chat.decode(ids)
        events: list[Event] = []
        if self._parser is not None:
            parsed = [*self._parser.feed(self._text[before:]), *self._parser.finish()]
            events += [call for each in parsed for call in self._call(each, now)]
            if self._opened is None and OPEN in self._text:
                self._opened = self._text.index(OPEN)
        end = len(self._text) if not self.calls or self._opened is None else self._opened
        thought, start = self._thought(end, ended=True)
        text = self._text[start:end]
        if self.calls:
            text = text.rstrip()
        if text:
            self._sent = start + len(text)
        if text or thought:
            events.insert(0, Text(text=text, token_ids=(), logprobs=(), thought=thought))
        return events

    @property
    def whole(self) -> str:
        """The text of all sampled tokens."""
        return self._chat.decode(self._ids)

    def message(self) -> Message:
        """Returns the assistant's message that the client is expected to send back."""
        begin = 0 if self._thoughts is None else self._thoughts.begin
        message: dict[str, object] = {"role": "assistant", "content": self._text[begin : self._sent]}
        if self._thoughts is not None and self._thoughts.thought:
            message["reasoning_content"] = self._thoughts.thought
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message

    def _stopped(self, before: int) -> bool:
        """Returns whether the text has a stop text now; cuts the text before the first one."""
        matches = [(self._text.find(stop, max(0, before - len(stop))), stop) for stop in self._stops]
        matches = [(at, stop) for at, stop in matches if at >= 0]
        if not matches:
            return False
        at, self.stop = min(matches, key=lambda match: match[0])
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
        thought, start = self._thought(end)
        text = self._text[start:end]
        if text:
            self._sent = end
        ids, logprobs = tuple(delta.token_ids), tuple(delta.logprobs)
        return [Text(text=text, token_ids=ids, logprobs=logprobs, thought=thought), *calls]

    def _thought(self, end: int, *, ended: bool = False) -> tuple[str, int]:
        """Returns what is new of the thought, and where the text begins that is new. end: of the visible text."""
        if self._thoughts is None:
            return "", self._sent
        thought = "" if self._thoughts.settled else self._thoughts.read(self._text[:end], ended=ended)
        return thought, max(self._sent, self._thoughts.begin)

    def _visible(self) -> int:
        """Returns where the visible text ends: before the start of a mark and the white space in front of it."""
        text = self._text
        if self._opened is not None:
            end = self._opened
        else:
            held = max((overlap(text, mark) for mark in self._marks), default=0) if self.stop is None else 0
            end = len(text) - held
        return len(text[:end].rstrip()) if self._parser is not None else end

    def _call(self, parsed: ToolCall | MalformedCall, now: float) -> list[Call]:
        """Notes a call and returns it as the client gets it; returns nothing for a call without a name."""
        if isinstance(parsed, ToolCall):
            name, arguments = parsed.name, json.dumps(parsed.arguments)
            malformed = is_malformed({"function": {"name": name, "arguments": arguments}})  # it may hold NaN
        else:
            named = _NAME.search(parsed.text)
            name, arguments, malformed = named[1] if named else "", _raw_arguments(parsed.text), True
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
                reply=f"FormatError: {parsed.reason}" if isinstance(parsed, MalformedCall) else "",
            )
        )
        if call_id is None:
            return []
        self.calls.append(Call(index=index, id=call_id, name=name, arguments=arguments))
        return self.calls[-1:]


def _raw_arguments(text: str) -> str:
    """Returns the text in the place of the arguments.

    >>> _raw_arguments('{"name": "f", "arguments": {"a": }}')
    '{"a": }'
    """
    match = _ARGUMENTS.search(text)
    if match is None:
        return text
    rest = text[match.end() :].strip()
    return rest.removesuffix("}").strip()
