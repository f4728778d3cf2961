"""What is asked of the gateway and what it answers, in no dialect: OpenAI's and Anthropic's are made into these.

A request is answered by a stream: `Begun`, `Text` as it is sampled, `Call` as its closing tag comes, one `Finished` at
the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.rollout.chat_template import Message

FinishReason = Literal["stop", "tool_calls", "length"]


class BadRequest(ValueError):
    """The request cannot be answered as it is; field: its part that is wrong, in the words of the dialect."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class OverBudget(BadRequest):
    """The session has used up its turns or tokens. In training that is how a rollout may end."""


class TooLong(OverBudget):
    """The conversation has no room for another token. In the words that OpenAI's clients look for."""

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(
            "messages",
            f"This model's maximum context length is {most} tokens. However, your messages resulted in {tokens} "
            "tokens. Please reduce the length of the messages.",
        )
        self.tokens = tokens
        self.most = most


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs:
    """How one turn is sampled; None leaves it to the session."""

    max_tokens: int | None = None
    """Of this turn."""
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the turn; the client does not get them, the trajectory has their tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """The next turn of a conversation.

    messages: in OpenAI's form, with `content` always text; an assistant's message may have `tool_calls`, a tool's has
    `tool_call_id`. tools: schemas in OpenAI's form that the template shows; (): none.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    knobs: Knobs = field(default_factory=Knobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRequest:
    """What comes after these tokens; nothing is parsed."""

    prompt_ids: tuple[int, ...]
    knobs: Knobs = field(default_factory=Knobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """The turn is being sampled. prompt_tokens: that the model has read; cached_tokens: of these, in a cache."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Sampled tokens with the text that the client reads of them; "" while a character or a call is not whole."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A tool call of the turn, whole. arguments: JSON text; of a call that could not be decoded the text as it was
    sampled, where at least its name could be read.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The end of the turn. message: what the client is expected to send back as the assistant's message.

    token_ids and logprobs: all that was sampled in the turn. stop: the text of `Knobs.stop` that ended it.
    """

    reason: FinishReason
    message: Message
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    stop: str | None = None


Event = Begun | Text | Call | Finished
