"""The gateway's requests and answers, independent of a dialect: those of OpenAI and Anthropic are converted to these.

The answer to a request is a stream: `Begun`, `Text` as it is sampled, `Call` as soon as its closing tag is there, and
one `Finished` at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.rollout.chat_template import Message

FinishReason = Literal["stop", "tool_calls", "length"]


class BadRequest(ValueError):
    """The request cannot be answered as it is. field: the wrong part, by the dialect's name."""

    code: str | None = None
    """The name by which OpenAI's clients know the error, if they do."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class OverBudget(BadRequest):
    """The session has used up its turns or tokens. In training, a rollout may end this way."""


class TooLong(OverBudget):
    """The conversation has no room for another token. The message has the wording that OpenAI's clients look for."""

    code = "context_length_exceeded"

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(
            "messages",
            f"This model's maximum context length is {most} tokens. However, your messages resulted in {tokens} "
            "tokens. Please reduce the length of the messages.",
        )
        self.tokens = tokens
        self.most = most


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOverrides:
    """How one turn is sampled. None leaves a value to the session."""

    max_tokens: int | None = None
    """The most tokens that this turn may sample."""
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the turn. The client does not get them, but the trajectory has their tokens."""
    changes: Mapping[str, str] = field(default_factory=dict)
    """Fields that ask for a sampling that there is not, each with the message that refuses it.

    A session that samples by its own rules passes over them.
    """

    def check_no_changes(self) -> None:
        """Raises BadRequest for the first of `changes`."""
        for name, message in self.changes.items():
            raise BadRequest(name, message)


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """What a turn must be, apart from thoughts before it.

    field: the part of the request that asks for it. tools: the tools that the turn may call. once: whether one call is
    all that it may have. schema: the JSON schema of an answer without calls; None: the turn must have a call.
    """

    field: str
    tools: tuple[Mapping[str, Any], ...] = ()
    once: bool = False
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """The next turn of a conversation.

    messages: in OpenAI's form, except that `content` is always text. An assistant's message may have `tool_calls` and
    `reasoning_content` (its thought), a tool's has `tool_call_id`. tools: the schemas, in OpenAI's form, that the
    template shows. constraint: None for a free turn.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    constraint: Constraint | None = None
    overrides: SamplingOverrides = field(default_factory=SamplingOverrides)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRequest:
    """A continuation of these tokens, which is not parsed."""

    prompt_ids: tuple[int, ...]
    overrides: SamplingOverrides = field(default_factory=SamplingOverrides)


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """The turn is being sampled. prompt_tokens: all that the model has read. cached_tokens: those from a cache."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Sampled tokens and the text that the client reads; "" while a character or a call is incomplete.

    thought: the part of the thought that came with these tokens (`engine.gateway.thoughts`).
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    thought: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A complete tool call of the turn.

    arguments: JSON text. If the call could not be decoded, although its name could be read: the text as it was sampled.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The end of the turn.

    message: what the client is expected to send back as the assistant's message; it may leave out `reasoning_content`.

    token_ids, logprobs: all that was sampled in the turn. stop: the one of `SamplingOverrides.stop` that ended it.
    """

    reason: FinishReason
    message: Message
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    stop: str | None = None


Event = Begun | Text | Call | Finished
