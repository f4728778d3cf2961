"""Rolls problems out on a model behind an OpenAI-compatible server, with the statistics of `engine.rollout`.

The calls are run here, with the texts that a rollout has for wrong ones; or on the server, where it answers as a whole
agent (`rocstar gateway CHECKPOINT tools=true`) and says in a trace how it came to the answer.

Invariants
- A request that the server refuses or fails is a typed error, never a wrong answer. A server that is gone is
  EndpointFailed, which ends the job.
- The tokens of a trajectory are counted as the server counts them. Their ids are unknown here and stand as -1.
- How long a prompt is says the first answer: it may have all of the budget's tokens, those that follow have the rest.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.errors import first_error
from engine.ports import StatefulTool, Tool
from engine.rollout.rollout import RolloutConfig, derive_seed
from engine.rollout.tool_call_parser import MalformedCall, ToolCall, ToolCallParser
from engine.rollout.turn import PendingToolCall, ToolLost
from engine.telemetry.timeline import Timeline
from engine.tools.python_tool import schema
from engine.types import Boundary, Prompt, RolloutError, StopReason, ToolUse, Trajectory, Turn
from recipes.rstar2.parts.sampling.endpoint import EndpointFailed, OnEndpoint


@dataclass(slots=True)
class _SoFar:
    """What a rollout has done so far."""

    turns: list[Turn] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, tokens: int, text: str, uses: Sequence[ToolUse], *, truncated: bool) -> None:
        start = self.turns[-1].end if self.turns else 0
        turn = Turn(
            start=start,
            end=start + tokens,
            tool_uses=tuple(uses),
            replica=-1,
            cached_tokens=0,
            queued_at=0.0,
            started_at=0.0,
            finished_at=0.0,
            truncated=truncated,
        )
        self.turns.append(turn)
        self.texts.append(text)


class RemoteRollouts:
    """Has the `run` of `engine.rollout.rollout.Rollouts`.

    speaker: makes a conversation with the server's model, under a seed. tool: runs its calls here; None: the server
    does, within its own budgets.
    """

    def __init__(
        self,
        speaker: Callable[[int], OnEndpoint],
        tool: Tool | StatefulTool | None,
        budget: RolloutConfig,
        timeline: Timeline,
        seed: int,
    ) -> None:
        self._speaker = speaker
        self._tool = tool
        self._budget = budget
        self._timeline = timeline
        self._seed = seed

    async def run(self, prompt: Prompt, sample: int, group: int) -> Trajectory:
        """Rolls one sample out.

        Raises EndpointFailed when the server is gone, refuses the key, or cannot be used at all.
        """
        started_at = self._timeline.now()
        seed = derive_seed(self._seed, prompt.id, sample, 0)
        so_far, stop, error = _SoFar(), StopReason.ERROR, None
        try:
            async with asyncio.timeout(self._budget.deadline_s) as deadline:
                stop = await self._converse(prompt, seed, so_far)
        except TimeoutError:
            if not deadline.expired():
                raise
            stop = StopReason.DEADLINE
        except ToolLost as failure:
            error = RolloutError(boundary=Boundary.SANDBOX, message=str(failure))
        except EndpointFailed as failure:
            if not failure.of_one_request:
                raise
            error = RolloutError(boundary=Boundary.ENDPOINT, message=str(failure))
        tokens = so_far.turns[-1].end if so_far.turns else 0
        return Trajectory(
            prompt=prompt,
            sample=sample,
            seed=seed,
            temperature=self._budget.temperature,
            token_ids_T=np.full(tokens, -1, np.int32),
            sampled_T=np.ones(tokens, np.bool_),
            logprobs_T=np.zeros(tokens, np.float32),
            versions_T=np.full(tokens, -1, np.int32),
            turns=tuple(so_far.turns),
            text="".join(so_far.texts),
            stop=stop,
            started_at=started_at,
            finished_at=self._timeline.now(),
            error=error,
        )

    async def _converse(self, prompt: Prompt, seed: int, so_far: _SoFar) -> StopReason:
        speaker = self._speaker(seed)
        speaker.messages = [dict(message) for message in prompt.messages]
        if self._tool is None:
            return await _ask_agent(speaker, so_far)
        async with AsyncExitStack() as opened:
            tool = self._tool if callable(self._tool) else await opened.enter_async_context(self._tool.open())
            while True:
                reply = await speaker.say(_ignore)
                text = speaker.messages[-1]["content"]
                calls = reply.calls or _malformed(text)
                uses = await self._answer(tool, calls)
                so_far.add(speaker.sampled[-1], _whole_text(text, calls), uses, truncated=not reply.whole)
                if not reply.whole:
                    return StopReason.LENGTH
                if not reply.calls:
                    return StopReason.ANSWER
                if len(so_far.turns) == self._budget.max_turns:
                    return StopReason.TURNS
                if speaker.max_tokens is not None and speaker.used >= speaker.max_tokens:
                    return StopReason.LENGTH
                speaker.hear_replies([use.response for use in uses])

    async def _answer(self, tool: Tool, calls: Sequence[ToolCall | MalformedCall]) -> list[ToolUse]:
        """Runs the calls of a turn at once and returns them with their replies. Raises ToolLost."""
        limit = self._budget.max_calls_per_turn
        kept = calls if limit is None or self._budget.surplus_calls == "refuse" else calls[:limit]
        pending = [self._pending(tool, call, surplus=limit is not None and at >= limit) for at, call in enumerate(kept)]
        try:
            async with asyncio.TaskGroup() as tasks:
                for call, one in zip(kept, pending, strict=True):
                    if isinstance(call, ToolCall) and one.reply is None:
                        tasks.create_task(one.run(tool, call.arguments, self._timeline), name=f"tool-{call.name}")
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures
        now = self._timeline.now()
        return [one.use(now) for one in pending]

    def _pending(self, tool: Tool, call: ToolCall | MalformedCall, *, surplus: bool) -> PendingToolCall:
        now = self._timeline.now()
        if isinstance(call, MalformedCall):
            return PendingToolCall.malformed(reason=call.reason, now=now)
        arguments = json.dumps(call.arguments)
        if call.name != tool.name:
            reason = f"NameError: no tool {call.name!r} (there is: {tool.name})"
            return PendingToolCall.refused(name=call.name, arguments=arguments, reason=reason, now=now)
        if surplus:
            reason = f"LimitError: at most {self._budget.max_calls_per_turn} calls"
            return PendingToolCall.refused(name=call.name, arguments=arguments, reason=reason, now=now)
        return PendingToolCall.closed(name=call.name, arguments=arguments, now=now, lane=0)


def schemas(tool: Tool | StatefulTool | None) -> list[dict[str, Any]]:
    """Returns what the server's model is shown of the tool that is run here."""
    return [] if tool is None else [schema(tool)]


async def _ask_agent(speaker: OnEndpoint, so_far: _SoFar) -> StopReason:
    """Sends one request to a server that runs the calls. A server that runs none is taken as a model without tools."""
    reply = await speaker.say(_ignore)
    trace = speaker.trace
    if trace is None:
        so_far.add(speaker.sampled[-1], speaker.messages[-1]["content"], [], truncated=not reply.whole)
        return StopReason.ANSWER if reply.whole else StopReason.LENGTH
    stop = StopReason(trace["stop"])
    for turn in trace["turns"]:
        so_far.add(turn["tokens"], turn["text"], [_traced(call) for call in turn["calls"]], truncated=False)
    return stop


def _traced(call: Mapping[str, Any]) -> ToolUse:
    return ToolUse(
        name=call["name"],
        arguments=json.dumps(call["arguments"]),
        outcome=call["outcome"],
        response=call["reply"],
        closed_at=0.0,
        dispatched_at=0.0,
        finished_at=call["seconds"],
        overlap_s=0.0,
        executed=call["outcome"] != "malformed",
        jailed=False,
    )


def _malformed(text: str) -> list[ToolCall | MalformedCall]:
    """Returns the calls that a server left in the text since it could not decode them.

    Nobody answers them; they count.
    """
    parser = ToolCallParser()
    return [*parser.feed(text), *parser.finish()]


def _whole_text(text: str, calls: Sequence[ToolCall | MalformedCall]) -> str:
    """Returns the text with the calls that the server took out of it."""
    written = [
        f"\n<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"
        for call in calls
        if isinstance(call, ToolCall)
    ]
    return text + "".join(written)


def _ignore(text: str) -> None:
    """Shows nothing: nobody watches an evaluation."""
