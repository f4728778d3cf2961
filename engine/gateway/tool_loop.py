"""Serves the whole agent behind one chat request: the server runs the model's calls and returns its last message.

A sample is a rollout by `Rollouts`, as in training: calls are dispatched while the turn goes on, and sampled text is
never tokenised again.

Invariants
- A failure of ours (a replica, the sandbox) raises Unavailable and never becomes an answer. Of several samples, either
  all are returned or none.
- Cancelling a request ends its samples, which frees their KV blocks and kills their calls.
- Every answer ends, by its budgets of tokens, turns and seconds.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from engine.errors import first_error
from engine.gateway.requests import BadRequest, ChatRequest, Finished, SamplingOverrides, TooLong
from engine.gateway.system_messages import shows_system_anywhere, with_system_first
from engine.gateway.thoughts import split_thought
from engine.rollout.chat_template import Message, TemplateError
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.types import Boundary, Prompt, StopReason, ToolUse, Trajectory, Turn


class Unavailable(RuntimeError):
    """Our infrastructure failed at this boundary. The same request may succeed later."""

    def __init__(self, boundary: Boundary, message: str) -> None:
        super().__init__(f"{boundary}: {message}")
        self.boundary = boundary


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One sample. finished: its last turn; `prompt_ids` holds all that the model had read before.

    prompt_tokens: the tokens of the prompt and of the tools' replies. sampled_tokens: those of all turns. Together they
    are the length of the conversation. trace: how the answer came about, as JSON values: `stop` (a `StopReason`), and
    `turns` with their texts and calls.
    """

    finished: Finished
    prompt_tokens: int
    sampled_tokens: int
    trace: Mapping[str, Any]


class ToolLoop:
    """Answers requests with the tools and the budgets of these rollouts. max_samples: the most samples in a request."""

    def __init__(self, rollouts: Rollouts, *, max_samples: int = 128) -> None:
        self._rollouts = rollouts
        self._system_anywhere = shows_system_anywhere(rollouts.chat)
        self._max_samples = max_samples
        self._groups = count()

    async def answer(self, request: ChatRequest, *, n: int = 1) -> list[Answer]:
        """Returns n samples. With a seed they are the same each time.

        The request's `max_tokens` limits the whole answer, with all turns and the replies between them. `stop` cuts the
        last message and ends no turn. Raises BadRequest and Unavailable.
        """
        if not 1 <= n <= self._max_samples:
            raise BadRequest("n", f"must be from 1 to {self._max_samples}, got {n}")
        request.overrides.check_no_changes()
        if request.constraint is not None:
            raise BadRequest(
                request.constraint.field,
                "this server answers with its own agent, which decides itself when it calls and what it says. Fix: "
                "bring tools of your own, or a server without tools=true",
            )
        rollouts = self._rollouts.with_config(_budget(self._rollouts.config, request.overrides))
        prompt, group = self._prompt(request), next(self._groups)
        try:
            async with asyncio.TaskGroup() as tasks:
                samples = [
                    tasks.create_task(_rolled_out(rollouts, prompt, sample, group), name=f"answer-{group}-{sample}")
                    for sample in range(n)
                ]
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures
        return [self._answer(sample.result(), request.overrides.stop) for sample in samples]

    def _prompt(self, request: ChatRequest) -> Prompt:
        """Returns the messages as a prompt. Raises BadRequest if they cannot be rendered or are too long."""
        seed = request.overrides.seed
        _check_no_calls(request.messages)
        messages = request.messages if self._system_anywhere else with_system_first(request.messages)
        try:
            prompt = Prompt(
                id=secrets.token_hex(8) if seed is None else f"seed-{seed}",
                messages=tuple(dict(message) for message in messages),
                answer="",
            )
            tokens = len(self._rollouts.chat.prompt_ids(prompt.messages))
        except (ValueError, TemplateError) as error:
            raise BadRequest("messages", str(error)) from error
        if tokens >= self._rollouts.config.max_tokens:
            raise TooLong(tokens, self._rollouts.config.max_tokens)
        return prompt

    def _answer(self, trajectory: Trajectory, stop: Sequence[str]) -> Answer:
        turns = trajectory.turns
        begin = turns[-1].start if turns else len(trajectory.token_ids_T)
        texts = [self._text(trajectory, turn) for turn in turns]
        thought, text = split_thought(texts[-1] if texts else "")
        content, stopped_by = _cut(text, stop)
        finished = Finished(
            reason="stop" if stopped_by is not None or trajectory.stop is StopReason.ANSWER else "length",
            message={
                "role": "assistant",
                "content": content,
                **({"reasoning_content": thought} if thought else {}),
            },
            prompt_ids=tuple(trajectory.token_ids_T[:begin].tolist()),
            token_ids=tuple(trajectory.token_ids_T[begin:].tolist()),
            logprobs=tuple(trajectory.logprobs_T[begin:].tolist()),
            cached_tokens=turns[0].cached_tokens if turns else 0,
            stop=stopped_by,
        )
        sampled = trajectory.sampled_tokens
        return Answer(
            finished=finished,
            prompt_tokens=len(trajectory.token_ids_T) - sampled,
            sampled_tokens=sampled,
            trace={
                "stop": str(trajectory.stop),
                "seconds": round(trajectory.finished_at - trajectory.started_at, 3),
                "turns": [_traced(turn, text) for turn, text in zip(turns, texts, strict=True)],
            },
        )

    def _text(self, trajectory: Trajectory, turn: Turn) -> str:
        chat = self._rollouts.chat
        return chat.decode(trajectory.token_ids_T[turn.start : turn.end].tolist()).removesuffix(chat.end_of_turn_text)


async def _rolled_out(rollouts: Rollouts, prompt: Prompt, sample: int, group: int) -> Trajectory:
    """Rolls a sample out. Raises Unavailable, which ends the other samples of the request."""
    trajectory = await rollouts.run(prompt, sample, group)
    if trajectory.error is not None:
        raise Unavailable(trajectory.error.boundary, trajectory.error.message)
    return trajectory


def _budget(config: RolloutConfig, overrides: SamplingOverrides) -> RolloutConfig:
    """Returns the configuration with a request's values, within the server's limits."""
    if overrides.max_tokens is not None:
        allowed = config.max_response_tokens or overrides.max_tokens
        config = replace(config, max_response_tokens=min(overrides.max_tokens, allowed))
    if overrides.temperature is not None:
        config = replace(config, temperature=overrides.temperature)
    if overrides.top_p is not None:
        config = replace(config, top_p=overrides.top_p)
    return config


def _check_no_calls(messages: Sequence[Message]) -> None:
    for at, message in enumerate(messages):
        if message.get("tool_calls") or message.get("role") == "tool":
            cause = "has calls or a reply to one, but here the server runs the calls itself"
            raise BadRequest("messages", f"messages[{at}] {cause}. Fix: give your tools in the field 'tools'")


def _cut(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Returns the text before the first stop text, and that stop text if there is one.

    >>> _cut("one. Two? Three.", ["Three", "?"])
    ('one. Two', '?')
    """
    matches = [(text.index(mark), mark) for mark in stop if mark in text]
    if not matches:
        return text, None
    at, mark = min(matches)
    return text[:at], mark


def _traced(turn: Turn, text: str) -> dict[str, Any]:
    return {
        "text": text,
        "tokens": turn.end - turn.start,
        "cached_tokens": turn.cached_tokens,
        "calls": [_traced_call(use) for use in turn.tool_uses],
    }


def _traced_call(use: ToolUse) -> dict[str, Any]:
    return {
        "name": use.name,
        "arguments": json.loads(use.arguments),
        "outcome": use.outcome,
        "reply": use.response,
        "seconds": round(use.finished_at - use.dispatched_at, 3),
    }
