"""The conversations of one agent as exact tokens. Pure: requests go in, token ids come out, and no replica is asked.

A *lineage* is a conversation that only grows: prompt ids, sampled ids, the ids of what the agent added, sampled ids ...
A request belongs to the lineage whose messages it begins with. A history that was edited, compacted or branched begins
another lineage.

Invariants
- Sampled text is never tokenised again: a lineage continues with the ids that its replicas sampled.
- A turn is in a lineage as a whole or not at all.
- A token counts as sampled in one lineage only; a branch has the tokens that it took over as given ones.
- The n-th message of a lineage is the n-th message of each request that continues it, after system messages were put
  where the template takes them (`engine.gateway.system_messages`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from engine.gateway.system_messages import shows_system_anywhere, with_system_first
from engine.gateway.thoughts import shows_thoughts, split_thought, with_thought_in_text
from engine.replica.port import Delta
from engine.rollout.chat_template import ChatTemplate, Message, TemplateError
from engine.rollout.token_buffer import TokenBuffer
from engine.rollout.tool_call_messages import decoded_arguments, normalize
from engine.types import Placement, Segment, ToolUse, Turn

MOST = 4096  # lineages in a session; each keeps its tokens and messages
_TAG_OF_THOUGHT = re.compile(r"(</?think>)")
REMEMBERED = 256  # sets of tools whose templates are kept, as each has to be audited


class NormalizedMessage(NamedTuple):
    """A message in the form in which two are compared.

    It leaves out what a client may change unintentionally: the ids of calls, white space around the text and around the
    tags of thoughts, the spelling of arguments, and the thought with which a turn begins (`thought_of`).
    """

    role: str
    text: str
    calls: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, message: Message) -> NormalizedMessage:
        """Returns the form of a message. message: as `normalize` returns it."""
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = tuple((each["name"], json.dumps(each["arguments"], sort_keys=True)) for each in functions)
        text = message["content"]
        if message["role"] == "assistant" and not message.get("reasoning_content"):
            _, text = split_thought(text)
        pieces = _TAG_OF_THOUGHT.split(text)  # and not a search for space around tags, whose time is quadratic
        return cls(message["role"], "".join(piece.strip() for piece in pieces), calls)


def thought_of(message: Message) -> str:
    """Returns the thought of a message, from its own field or from its text; "" if it has none."""
    if message["role"] != "assistant":
        return ""
    return (message.get("reasoning_content") or split_thought(message["content"])[0]).strip()


def with_text_for_malformed_calls(message: Message) -> Message:
    """Returns a message with its malformed calls as text after the content.

    Templates and some dialects cannot express a call whose arguments are not a JSON object.
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
    """Returns the messages with the results of each turn in the order of its calls, as templates show them.

    A client that runs calls concurrently may send the results in another order. A result without an id belongs to the
    first call that has no result yet. Raises ValueError for a result of an unknown call, or of one that has a result.
    """
    ordered: list[Message] = []
    at = 0
    while at < len(messages):
        ordered.append(messages[at])
        ids = _call_ids(messages[at])
        at += 1
        results: dict[int, Message] = {}  # number of the call -> its result
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
    """Returns the number of the call that a result belongs to. Raises ValueError."""
    given = result.get("tool_call_id")
    numbers = [number for number, each in enumerate(ids) if given in (None, each) or each is None]
    if not numbers:
        raise ValueError(f"{place}: tool_call_id {given!r} matches no call of the message before it, which has {ids}")
    unanswered = [number for number in numbers if number not in results]
    if not unanswered:
        raise ValueError(f"{place}: the call that tool_call_id {given!r} names has a result already")
    return unanswered[0]


def is_malformed(call: Any) -> bool:
    """Returns whether a call names a function but its arguments are no JSON object.

    JSON has no infinite numbers and no NaN, and half of a surrogate pair is no text.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return False  # not a call at all; `normalize` refuses it
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
    """Returns a malformed call as the text that the model wrote."""
    return f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}</tool_call>'


@dataclass(kw_only=True, slots=True)
class CalledTool:
    """A call of a turn and the agent's reply.

    id: None for a call that the agent never got. outcome: None until there is a reply.
    """

    id: str | None
    name: str
    arguments: str
    closed_at: float
    outcome: str | None = None
    reply: str = ""
    answered_at: float | None = None

    def use(self) -> ToolUse:
        """Returns the call as a record. One without a reply was cut off by the end of its agent."""
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
    """A sampled turn. start, end: the range of its tokens. messages: how many the lineage had after the turn."""

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
        """Returns the turn as a record."""
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
    """A conversation. number: 0 for the first one of its session. parent_turns: how many turns it took over.

    busy: whether a turn is being sampled, so that another request has to branch off.
    """

    def __init__(self, number: int, chat: ChatTemplate, tools: str, key: int) -> None:
        self.number = number
        self.chat = chat
        self.tools = tools
        self.key = key
        self.busy = False
        self.buffer = TokenBuffer(())
        self.messages: list[Message] = []  # as the template gets them, with the text that the model sampled
        self.normalized: list[NormalizedMessage] = []  # as the client sends them
        self.thoughts: list[str] = []  # those of the messages
        self.turns: list[SampledTurn] = []
        self.parent_turns = 0
        self.prompt_tokens = 0

    @classmethod
    def unanswered(cls, chat: ChatTemplate, messages: Sequence[Message]) -> Lineage:
        """Returns the lineage of a prompt that no replica has seen."""
        lineage = cls(0, chat, "", 0)
        lineage.buffer = TokenBuffer(chat.prompt_ids(messages))
        return lineage

    @property
    def turn_number(self) -> int:
        """Returns the number of the next turn."""
        return self.parent_turns + len(self.turns)

    @property
    def text(self) -> str:
        """The text of the turns that were sampled here."""
        return "".join(turn.text for turn in self.turns)

    def boundaries(self) -> Iterator[SampledTurn]:
        """Yields the turns, the last one first; a request may continue after each."""
        return reversed(self.turns)

    def segment(self) -> Segment:
        """Returns the lineage as a segment of a trajectory."""
        turns = tuple(turn.turn() for turn in self.turns)
        return Segment(**self.buffer.arrays(), turns=turns, routes=self.buffer.routes)


@dataclass(kw_only=True, slots=True)
class Opened:
    """A turn that is about to be sampled. Until it is closed or given up, its lineage is busy and stays as it is.

    ids: all that the model reads. given: those ids that the lineage does not have yet. reused: how many ids were not
    rendered again.
    """

    lineage: Lineage
    ids: list[int]
    given: list[int]
    messages: list[Message]
    normalized: list[NormalizedMessage]
    thoughts: list[str]
    reused: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """The messages of a request, in the order in which the template gets them.

    normalized, thoughts: the forms in which they are compared. call_ids: those of each message's calls, as the client
    sends them. tools: the shown tools as text, "" for none.
    """

    messages: list[Message]
    normalized: list[NormalizedMessage]
    thoughts: list[str]
    call_ids: list[list[Any]]
    tools: str
    chat: ChatTemplate


class Chats:
    """The chat template with the tools of requests. It keeps the templates of the latest sets of tools.

    system_anywhere: whether the template takes a system message after others. thoughts_apart: whether it shows the
    field `reasoning_content`; if not, the thought is a part of the text.
    """

    def __init__(self, plain: ChatTemplate) -> None:
        self.plain = plain
        self.system_anywhere = shows_system_anywhere(plain)
        self.thoughts_apart = shows_thoughts(plain)
        self._showing: dict[str, ChatTemplate] = {}

    def showing(self, key: str, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """Returns the template that shows these tools. key: the tools as text, "" for none.

        A template that cannot show tools is returned unchanged; then the messages have to describe the tools. Raises
        TemplateError if the template is unusable with these tools.
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
        self.all: list[Lineage] = []  # the lineages that have a turn

    def open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], now: float) -> Opened:
        """Opens a turn in the lineage that these messages continue, or in a new one.

        Raises ValueError or TemplateError for messages that cannot be rendered.
        """
        if len(self.all) >= MOST:
            raise ValueError(f"a session has at most {MOST} conversations. Fix: begin another session")
        asked = self._asked(messages, tools)
        match = self._match(asked)
        if match is not None:
            lineage, turn = match
            _answer(turn, asked.messages[turn.messages :], now)
            try:
                return self._continue(lineage, turn, asked)
            except TemplateError:
                pass  # the template renders earlier turns differently with these messages, so this is a new lineage
        lineage = self._new(asked.tools, asked.chat)
        lineage.buffer = TokenBuffer(lineage.chat.prompt_ids(asked.messages))
        lineage.prompt_tokens = len(lineage.buffer)
        lineage.busy = True
        return Opened(
            lineage=lineage,
            ids=list(lineage.buffer.ids),
            given=[],
            messages=asked.messages,
            normalized=asked.normalized,
            thoughts=asked.thoughts,
            reused=0,
        )

    def count(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int:
        """Returns how many tokens the model would read after `open`, and opens nothing. Raises as `open` does."""
        asked = self._asked(messages, tools)
        match = self._match(asked)
        if match is not None:
            lineage, turn = match
            try:
                return turn.end + len(_ids_after(lineage, turn, asked.messages[turn.messages :]))
            except TemplateError:
                pass
        return len(asked.chat.prompt_ids(asked.messages))

    def open_text(self, prompt_ids: Sequence[int]) -> Opened:
        """Opens a turn after plain tokens, in a lineage that no conversation continues."""
        lineage = self._new("", self._chats.plain)
        lineage.buffer = TokenBuffer(prompt_ids)
        lineage.prompt_tokens = len(prompt_ids)
        lineage.busy = True
        return Opened(
            lineage=lineage, ids=list(prompt_ids), given=[], messages=[], normalized=[], thoughts=[], reused=0
        )

    def close(self, opened: Opened, deltas: Sequence[Delta], turn: SampledTurn, reply: Message) -> None:
        """Adds a sampled turn to its lineage. reply: the message that the client gets, and sends back."""
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
        [given] = normalize([with_text_for_malformed_calls(reply)])
        lineage.normalized = [*opened.normalized, NormalizedMessage.of(given)]
        lineage.thoughts = [*opened.thoughts, thought_of(given)]
        turn.messages = len(lineage.messages)
        lineage.turns.append(turn)
        lineage.busy = False

    def _asked(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> _Asked:
        """Returns messages as they are matched and rendered. Raises ValueError and TemplateError."""
        ordered = in_order_of_calls(messages)
        if not self._chats.system_anywhere:
            ordered = with_system_first(ordered)
        given: list[Message] = [*normalize([with_text_for_malformed_calls(message) for message in ordered])]
        shown = msgspec.json.encode(tools, order="sorted").decode() if tools else ""
        return _Asked(
            messages=given if self._chats.thoughts_apart else [with_thought_in_text(message) for message in given],
            normalized=[NormalizedMessage.of(message) for message in given],
            thoughts=[thought_of(message) for message in given],
            call_ids=[_call_ids(message) for message in ordered],
            tools=shown,
            chat=self._chats.showing(shown, tools),
        )

    def _match(self, asked: _Asked) -> tuple[Lineage, SampledTurn] | None:
        """Returns the deepest turn whose history these messages begin with.

        Among equals it is the one whose thoughts and calls the client sends back, then one that is last and free.
        """
        best: tuple[int, int, bool, Lineage, SampledTurn] | None = None
        for lineage in self.all:
            if lineage.tools != asked.tools:
                continue
            for turn in lineage.boundaries():
                depth = turn.messages
                if depth >= len(asked.messages) or (best is not None and depth < best[0]):
                    continue
                if lineage.normalized[:depth] != asked.normalized[:depth]:
                    continue
                pairs = [*zip(asked.thoughts[:depth], lineage.thoughts, strict=False)]
                if any(thought and thought != own for thought, own in pairs):
                    continue
                near = sum(thought == own for thought, own in pairs)
                near += sum(call.id is not None and call.id in asked.call_ids[depth - 1] for call in turn.calls)
                free = turn is lineage.turns[-1] and not lineage.busy
                if best is None or (depth, near, free) > best[:3]:
                    best = (depth, near, free, lineage, turn)
                break
        return None if best is None else best[3:]

    def _continue(self, lineage: Lineage, turn: SampledTurn, asked: _Asked) -> Opened:
        depth = turn.messages
        new = asked.messages[depth:]
        given = _ids_after(lineage, turn, new)
        before, thoughts = lineage.messages[:depth], lineage.thoughts[:depth]
        if lineage.busy or turn is not lineage.turns[-1]:
            lineage = self._branch(lineage, turn)
        lineage.busy = True
        return Opened(
            lineage=lineage,
            ids=[*lineage.buffer.ids, *given],
            given=given,
            messages=[*before, *new],
            normalized=asked.normalized,
            thoughts=[*thoughts, *asked.thoughts[depth:]],  # those that the model had, which the client may leave out
            reused=turn.end,
        )

    def _branch(self, lineage: Lineage, turn: SampledTurn) -> Lineage:
        """Returns a new lineage that has all tokens up to the end of a turn as given ones."""
        at = next(number for number, each in enumerate(lineage.turns) if each is turn) + 1
        branch = self._new(lineage.tools, lineage.chat)
        branch.buffer = TokenBuffer(lineage.buffer.ids[: turn.end])
        if (routes := lineage.buffer.routes) is not None:
            branch.buffer.append_routes(routes.up_to(turn.end - 1), 0)
        branch.prompt_tokens = lineage.prompt_tokens
        branch.parent_turns = lineage.parent_turns + at
        return branch

    def _new(self, tools: str, chat: ChatTemplate) -> Lineage:
        lineage = Lineage(self._made, chat, tools, self._new_key())
        self._made += 1
        return lineage


def _ids_after(lineage: Lineage, turn: SampledTurn, new: Sequence[Message]) -> list[int]:
    """Returns the ids between a sampled turn and the next one. Raises TemplateError, as `ids_after_turn` does."""
    sampled = turn.text.removesuffix(lineage.chat.end_of_turn_text)
    given = lineage.chat.ids_after_turn(lineage.messages[: turn.messages - 1], sampled, new)
    if lineage.buffer.ids[turn.end - 1] != lineage.chat.end_of_turn:
        given = [lineage.chat.end_of_turn, *given]
    return given


def _answer(turn: SampledTurn, new: Sequence[Message], now: float) -> None:
    """Notes the results of the agent's tools in the calls of a turn.

    A result is matched by the id of its call, or else by its order. `is_error` marks a call that failed.
    """
    given = [call for call in turn.calls if call.id is not None]
    by_id = {call.id: call for call in given}
    replies = [message for message in new if message["role"] == "tool"]
    for call, reply in zip(given, replies, strict=False):
        call = by_id.get(reply.get("tool_call_id"), call)
        if call.answered_at is None:
            call.outcome = call.outcome or ("error" if reply.get("is_error") else "ok")
            call.reply, call.answered_at = reply["content"], now
