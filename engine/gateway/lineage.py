"""The conversations of one agent as exact tokens. Pure: requests go in, ids come out; no replica is asked here.

A *lineage* is a conversation that was only appended to: prompt ids, sampled ids, the ids of what the agent added,
sampled ids ... A request belongs to the lineage whose messages it begins with; a history that was edited, compacted or
branched begins another one.

Invariants
- What was sampled is never tokenised again: a lineage goes on with the ids that its replicas sampled.
- A turn is in a lineage whole or not at all.
- A token is sampled in one lineage only: what a branch took over it has as given.
- The n-th message of a lineage is the n-th one of each request that goes on with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.replica.port import Delta
from engine.rollout.chat_template import ChatTemplate, Message, TemplateError
from engine.rollout.token_buffer import TokenBuffer
from engine.rollout.tool_call_messages import decoded_arguments, normalize
from engine.types import Placement, Segment, ToolUse, Turn

MOST = 4096  # lineages of a session: each keeps its tokens and messages
_AROUND_THOUGHTS = re.compile(r"\s*(</?think>)\s*")
REMEMBERED = 256  # sets of tools whose rendering was audited


class Heard(NamedTuple):
    """A message as two are compared: what a client may change without meaning it is left out (the ids of calls, white
    space around the text and the tags of its thoughts, the spelling of arguments).
    """

    role: str
    text: str
    calls: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, message: Message) -> Heard:
        """message: as `normalize` leaves it."""
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = tuple((each["name"], json.dumps(each["arguments"], sort_keys=True)) for each in functions)
        return cls(message["role"], _AROUND_THOUGHTS.sub(r"\1", message["content"]).strip(), calls)


def with_text_for_malformed_calls(message: Message) -> Message:
    """Calls whose arguments are no JSON object, as text after the content: neither templates nor every dialect can say
    them as calls.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    whole = [call for call in calls if not is_malformed(call)]
    content = message.get("content") or ""
    for call in calls:
        if is_malformed(call):
            content += malformed_text(call["function"]["name"], call["function"]["arguments"])
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": content, **({"tool_calls": whole} if whole else {})}


def in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """The same with the results of a turn's calls in the order of the calls, as templates show them: a client whose
    calls run at once may send them as they came. Results without an id stand for the calls that are left.

    Raises ValueError for a result of a call that the turn does not have, or that has another result already.
    """
    ordered: list[Message] = []
    at = 0
    while at < len(messages):
        ordered.append(messages[at])
        ids = _call_ids(messages[at])
        at += 1
        results: dict[int, Message] = {}  # by the number of their call
        while ids and at < len(messages) and messages[at].get("role") == "tool":
            results[_answered(messages[at], f"message {at}", ids, results)] = messages[at]
            at += 1
        ordered += [results[number] for number in sorted(results)]
    return ordered


def _call_ids(message: Message) -> list[Any]:
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, list | tuple) else ()
    return [call.get("id") if isinstance(call, Mapping) else None for call in calls]


def _answered(result: Message, place: str, ids: Sequence[Any], results: Mapping[int, Message]) -> int:
    """The number of the call that a result is of. Raises ValueError."""
    given = result.get("tool_call_id")
    numbers = [number for number, each in enumerate(ids) if given in (None, each) or each is None]
    if not numbers:
        raise ValueError(f"{place}: tool_call_id {given!r} is of no call of the message before it, which has {ids}")
    left = [number for number in numbers if number not in results]
    if not left:
        raise ValueError(f"{place}: the call that tool_call_id {given!r} names has a result already")
    return left[0]


def is_malformed(call: Any) -> bool:
    """Whether a call names a function, and has arguments that are text but not that of a JSON object (a number that is
    not finite is none of JSON), or of one with half of a surrogate pair, which is no text.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return False  # not a call at all, which `normalize` says
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return False
    try:
        value = decoded_arguments(arguments)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return True
    return not isinstance(value, dict)


def malformed_text(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}</tool_call>'


@dataclass(kw_only=True, slots=True)
class CalledTool:
    """A call of a turn, and what the agent told of it. id: None of a call that it never got. outcome: None while it has
    told nothing.
    """

    id: str | None
    name: str
    arguments: str
    closed_at: float
    outcome: str | None = None
    reply: str = ""
    answered_at: float | None = None

    def use(self) -> ToolUse:
        """A call that the agent did not answer was cut off by its end."""
        return ToolUse(
            name=self.name,
            arguments=self.arguments,
            outcome=self.outcome or "killed",
            response=self.reply,
            closed_at=self.closed_at,
            dispatched_at=self.closed_at,
            finished_at=self.closed_at if self.answered_at is None else self.answered_at,
            overlap_s=0.0,
            executed=self.outcome not in (None, "malformed"),
            jailed=False,
        )


@dataclass(kw_only=True, slots=True)
class SampledTurn:
    """One turn that was sampled here. start, end: of its tokens. messages: how many the lineage had after it."""

    start: int
    end: int
    messages: int
    truncated: bool
    replica: int
    cached_tokens: int
    queued_at: float
    started_at: float
    finished_at: float
    text: str
    calls: list[CalledTool] = field(default_factory=list)
    placed: list[Placement] = field(default_factory=list)

    def turn(self) -> Turn:
        return Turn(
            start=self.start,
            end=self.end,
            tool_uses=tuple(call.use() for call in self.calls),
            replica=self.replica,
            cached_tokens=self.cached_tokens,
            queued_at=self.queued_at,
            started_at=self.started_at,
            finished_at=self.finished_at,
            truncated=self.truncated,
            placed=tuple(self.placed),
        )


class Lineage:
    """A conversation. number: 0 is the first one of its session. parent_turns: how many turns it took over.

    busy: a turn of it is being sampled, so that another request has to branch off.
    """

    def __init__(self, number: int, chat: ChatTemplate, tools: str, key: int) -> None:
        self.number = number
        self.chat = chat
        self.tools = tools
        self.key = key
        self.busy = False
        self.buffer = TokenBuffer(())
        self.messages: list[Message] = []  # as the template gets them: those of the model have the text it sampled
        self.heard: list[Heard] = []  # as the client sends them
        self.turns: list[SampledTurn] = []
        self.parent_turns = 0
        self.prompt_tokens = 0

    @classmethod
    def unanswered(cls, chat: ChatTemplate, messages: Sequence[Message]) -> Lineage:
        """A prompt that no replica has seen."""
        lineage = cls(0, chat, "", 0)
        lineage.buffer = TokenBuffer(chat.prompt_ids(messages))
        return lineage

    @property
    def turn_number(self) -> int:
        """Of the next turn."""
        return self.parent_turns + len(self.turns)

    @property
    def text(self) -> str:
        """Of the turns that were sampled here."""
        return "".join(turn.text for turn in self.turns)

    def boundaries(self) -> Iterator[SampledTurn]:
        """The ends of its turns, the last one first."""
        return reversed(self.turns)

    def segment(self) -> Segment:
        return Segment(**self.buffer.arrays(), turns=tuple(turn.turn() for turn in self.turns))


@dataclass(kw_only=True, slots=True)
class Opened:
    """A turn that is about to be sampled: where it belongs, and what the model reads. The lineage is busy until it is
    closed or given up, and has nothing of it before.

    ids: all of it. given: the ids of it that the lineage does not have yet. reused: how many were not rendered anew.
    """

    lineage: Lineage
    ids: list[int]
    given: list[int]
    messages: list[Message]
    heard: list[Heard]
    reused: int


class Chats:
    """The chat template with the tools that requests show; those of the last requests are remembered."""

    def __init__(self, plain: ChatTemplate) -> None:
        self.plain = plain
        self._showing: dict[str, ChatTemplate] = {}

    def showing(self, key: str, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """key: the tools as text, "" for none. Raises TemplateError where the template is unusable with them.

        A template that shows no tools stays as it is: the messages say then what can be called.
        """
        if not key:
            return self.plain
        if key not in self._showing:
            if len(self._showing) >= REMEMBERED:
                del self._showing[next(iter(self._showing))]
            self._showing[key] = self.plain.with_tools(tools)
        return self._showing[key]


class Lineages:
    """The lineages of one session."""

    def __init__(self, chats: Chats, new_key: Callable[[], int]) -> None:
        self._chats = chats
        self._new_key = new_key
        self._made = 0
        self.all: list[Lineage] = []  # those that have a turn

    def open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], now: float) -> Opened:
        """The lineage that these messages go on with, or a new one. Raises ValueError or TemplateError for messages
        that cannot be rendered.
        """
        ordered = in_order_of_calls(messages)
        given: list[Message] = [*normalize([with_text_for_malformed_calls(message) for message in ordered])]
        heard = [Heard.of(message) for message in given]
        if len(self.all) >= MOST:
            raise ValueError(f"a session has at most {MOST} conversations. Fix: begin another session")
        shown = json.dumps(tools, sort_keys=True) if tools else ""
        chat = self._chats.showing(shown, tools)
        found = self._match(heard, shown)
        if found is not None:
            lineage, turn = found
            try:
                return self._go_on(lineage, turn, given, heard, now)
            except TemplateError:
                pass  # the template renders earlier turns otherwise once these messages follow: a history of its own
        lineage = self._new(shown, chat)
        lineage.buffer = TokenBuffer(lineage.chat.prompt_ids(given))
        lineage.prompt_tokens = len(lineage.buffer)
        lineage.busy = True
        return Opened(lineage=lineage, ids=list(lineage.buffer.ids), given=[], messages=given, heard=heard, reused=0)

    def open_text(self, prompt_ids: Sequence[int]) -> Opened:
        """A lineage of plain tokens, which no conversation goes on with."""
        lineage = self._new("", self._chats.plain)
        lineage.buffer = TokenBuffer(prompt_ids)
        lineage.prompt_tokens = len(prompt_ids)
        lineage.busy = True
        return Opened(lineage=lineage, ids=list(prompt_ids), given=[], messages=[], heard=[], reused=0)

    def close(self, opened: Opened, deltas: Sequence[Delta], turn: SampledTurn, said: Message) -> None:
        """The turn was sampled. said: the message that the client gets, and sends back."""
        lineage = opened.lineage
        if not lineage.turns and lineage not in self.all:
            self.all.append(lineage)
        if opened.given:
            lineage.buffer.append_given(opened.given)
        turn.start = len(lineage.buffer)
        for delta in deltas:
            lineage.buffer.append_sampled(delta)
        for version, begin, end in deltas[-1].spans:
            lineage.buffer.label(version, turn.start + begin, turn.start + end)
        turn.end = len(lineage.buffer)
        kept = lineage.chat.kept_prefill + turn.text.removesuffix(lineage.chat.end_of_turn_text)
        lineage.messages = [*opened.messages, {"role": "assistant", "content": kept}]
        lineage.heard = [*opened.heard, Heard.of(normalize([with_text_for_malformed_calls(said)])[0])]
        turn.messages = len(lineage.messages)
        lineage.turns.append(turn)
        lineage.busy = False

    def _match(self, heard: Sequence[Heard], tools: str) -> tuple[Lineage, SampledTurn] | None:
        """The deepest turn whose history these messages begin with; of equals that which is last and free."""
        best: tuple[int, bool, Lineage, SampledTurn] | None = None
        for lineage in self.all:
            if lineage.tools != tools:
                continue
            for turn in lineage.boundaries():
                depth = turn.messages
                if depth >= len(heard) or (best is not None and depth < best[0]):
                    continue
                if lineage.heard[:depth] != list(heard[:depth]):
                    continue
                free = turn is lineage.turns[-1] and not lineage.busy
                if best is None or (depth, free) > best[:2]:
                    best = (depth, free, lineage, turn)
                break
        return None if best is None else best[2:]

    def _go_on(
        self, lineage: Lineage, turn: SampledTurn, messages: list[Message], heard: list[Heard], now: float
    ) -> Opened:
        before, new = lineage.messages[: turn.messages], messages[turn.messages :]
        said = turn.text.removesuffix(lineage.chat.end_of_turn_text)
        given = lineage.chat.ids_after_turn(before[:-1], said, new)
        if lineage.buffer.ids[turn.end - 1] != lineage.chat.end_of_turn:
            given = [lineage.chat.end_of_turn, *given]
        _answer(turn, new, now)
        reused = turn.end
        if lineage.busy or turn is not lineage.turns[-1]:
            lineage = self._branch(lineage, turn)
        lineage.busy = True
        return Opened(
            lineage=lineage,
            ids=[*lineage.buffer.ids, *given],
            given=given,
            messages=[*before, *new],
            heard=heard,
            reused=reused,
        )

    def _branch(self, lineage: Lineage, turn: SampledTurn) -> Lineage:
        """A lineage that has everything up to the end of the turn as given."""
        at = next(number for number, each in enumerate(lineage.turns) if each is turn) + 1
        branch = self._new(lineage.tools, lineage.chat)
        branch.buffer = TokenBuffer(lineage.buffer.ids[: turn.end])
        branch.prompt_tokens = lineage.prompt_tokens
        branch.parent_turns = lineage.parent_turns + at
        return branch

    def _new(self, tools: str, chat: ChatTemplate) -> Lineage:
        lineage = Lineage(self._made, chat, tools, self._new_key())
        self._made += 1
        return lineage


def _answer(turn: SampledTurn, new: Sequence[Message], now: float) -> None:
    """What the agent's tools said to the calls of the turn: by the ids of the calls, else in their order; by `is_error`
    that one failed.
    """
    given = [call for call in turn.calls if call.id is not None]
    by_id = {call.id: call for call in given}
    replies = [message for message in new if message["role"] == "tool"]
    for call, reply in zip(given, replies, strict=False):
        call = by_id.get(reply.get("tool_call_id"), call)
        if call.answered_at is None:
            call.outcome = call.outcome or ("error" if reply.get("is_error") else "ok")
            call.reply, call.answered_at = reply["content"], now
