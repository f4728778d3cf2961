"""Scripted turns for `bench streaming`, token by token, on real engines.

An engine's samples are replaced by those of a script when they leave it, and put back when it is asked to continue. Its
time, its steps and its cache are real; the text and its tool calls are ours.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bench.benches.fleet.engines import Engines, KeptReplica
from engine.ports import ToolReply
from engine.replica.port import Delta, Sampling
from engine.rollout.chat_template import ChatTemplate
from engine.tools.python_tool import PythonTool
from engine.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """How a model calls tools.

    calls: so many per turn, each but the last followed by `before` tokens of text on average. after: tokens on average
    between the last call and the end of the turn (terse models: none).
    """

    name: str
    calls: int = 1
    before: int = 40
    after: int = 0


STYLES = (
    Style(name="terse"),
    Style(name="talkative", after=40),
    Style(name="terse-3-calls", calls=3),
    Style(name="talkative-3-calls", calls=3, after=40),
)
# Seconds of a tool call: the workload study's lognormal (mean 0.2 s, within 0.02 and 4 s).
MEDIAN_S, SIGMA, LEAST_S, MOST_S = 0.145, 0.92, 0.02, 4.0


@dataclass(slots=True)
class Progress:
    """Where a trajectory is: its turn, where that begins, and the ids that the engine knows."""

    turn: int = 0
    start: int = 0
    engine_ids: list[int] = field(default_factory=list)
    ended: list[asyncio.Event] = field(default_factory=list)  # set when a turn is generated to its end


class Script:
    """The turns of every trajectory, for one run."""

    def __init__(
        self,
        chat: ChatTemplate,
        encode: Callable[[str], list[int]],
        style: Style,
        trajectories: int,
        turns: int,
        seed: int,
    ) -> None:
        self.chat = chat
        self._encode = encode
        self._filler = encode(" and so on" * 200)
        rng = np.random.default_rng(seed)
        self.turns = [[self._turn(rng, style, key, n, turns) for n in range(turns)] for key in range(trajectories)]
        self.progress: dict[int, Progress] = {}

    def _turn(self, rng: np.random.Generator, style: Style, key: int, number: int, turns: int) -> list[int]:
        ids = self._text(rng, style.before)
        if number + 1 < turns:
            for call in range(style.calls):
                ids += self._text(rng, style.before) if call else []
                seconds = float(np.clip(MEDIAN_S * np.exp(SIGMA * rng.standard_normal()), LEAST_S, MOST_S))
                ids += self._call(key, number, round(seconds, 3))
            ids += self._text(rng, style.after)
        return [*ids, self.chat.end_of_turn]

    def _text(self, rng: np.random.Generator, mean_tokens: int) -> list[int]:
        return self._filler[: round(mean_tokens * float(np.exp(0.6 * rng.standard_normal() - 0.18)))]

    def _call(self, key: int, turn: int, seconds: float) -> list[int]:
        code = f"import time; time.sleep({seconds})"
        arguments = {"code": code, "s": seconds, "key": key, "turn": turn}
        body = json.dumps({"name": "python", "arguments": arguments})
        return self._encode(f"<tool_call>{body}</tool_call>")

    def prompt(self, key: int) -> Prompt:
        return Prompt(id=str(key), messages=({"role": "user", "content": f"task {key}."},), answer="")

    def begin(self, token_ids: Sequence[int]) -> tuple[Progress, list[int]]:
        """Returns where the trajectory is that asks with these ids, and the rest of its turn."""
        match = re.search(r"task (\d+)\.", self.chat.decode(token_ids[:64]))
        assert match is not None, "a prompt names its task"
        key = int(match[1])
        if key not in self.progress:
            events = [asyncio.Event() for _ in self.turns[key]]
            self.progress[key] = Progress(start=len(token_ids), ended=events)
        progress = self.progress[key]
        if len(token_ids) >= progress.start + len(self.turns[key][progress.turn]):
            progress.turn, progress.start = progress.turn + 1, len(token_ids)
        del progress.engine_ids[len(token_ids) :]
        progress.engine_ids += token_ids[len(progress.engine_ids) :]
        return progress, self.turns[key][progress.turn][len(token_ids) - progress.start :]


class SpeakingReplica(KeptReplica):
    """Gives the tokens of `script` at the pace of its engine."""

    script: Script

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, request_id: str
    ) -> AsyncGenerator[Delta, None]:
        progress, scripted = self.script.begin(token_ids)
        asked = replace(sampling, max_tokens=len(scripted), seed=None, stop_token_ids=(), ignore_eos=True)
        given = 0
        async with aclosing(super().generate(list(progress.engine_ids), asked, request_id)) as deltas:
            async for delta in deltas:
                progress.engine_ids += delta.token_ids
                ids = scripted[given : given + len(delta.token_ids)]
                given += len(ids)
                finish = delta.finish and ("stop" if given == len(scripted) else delta.finish)
                if finish == "stop":
                    progress.ended[progress.turn].set()
                yield replace(delta, token_ids=ids, finish=finish)


class SpeakingEngines(Engines):
    """Engines whose replicas give the tokens of the script that is played, also before the first fleet."""

    script: Script

    def _new(self, index: int, core: int | None) -> SpeakingReplica:
        replica = SpeakingReplica(self.config, index, core)
        replica.script = self.script
        return replica

    def play(self, script: Script) -> None:
        self.script = script
        for replica in self.replicas.values():
            assert isinstance(replica, SpeakingReplica)
            replica.script = script


class ScriptedTool:
    """Runs a scripted call at once, or when its turn is generated to its end.

    at_turn_end: trajectories whose key modulo 2 is among these do the latter. python: runs calls in the sandbox; None:
    the call's seconds are slept here.
    """

    name = "python"

    def __init__(self, script: Script, *, at_turn_end: Collection[int], python: PythonTool | None = None) -> None:
        self._script = script
        self._at_turn_end = at_turn_end
        self._python = python

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolReply:
        if arguments["key"] % 2 in self._at_turn_end:
            await self._script.progress[arguments["key"]].ended[arguments["turn"]].wait()
        if self._python is not None:
            return await self._python(arguments)
        await asyncio.sleep(arguments["s"])
        return ToolReply(outcome="ok", text="done")
