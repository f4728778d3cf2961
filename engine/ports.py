"""What the engine needs from outside, as Protocols. Anything of the right shape fits; nothing is inherited.

Each Protocol shows an implementation of at most 20 lines; `tests/contracts.py` holds a check per Protocol that a user
can run on an implementation of their own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engine.types import Trajectory
from sandbox.wire import Limits, ToolResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How one turn is sampled. max_tokens bounds the turn; seed is per (run, prompt, sample, turn)."""

    max_tokens: int
    temperature: float
    seed: int | None
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """One or more tokens as a replica produced them. finish is set on the last one: "stop", "length" or "abort".

    version: the replica's weight version now; spans: on the last delta (version, start, end) over all tokens of the
    request, exact across updates in flight.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str | None = None
    cached_tokens: int = 0
    version: int = 0
    spans: Sequence[tuple[int, int, int]] = ()


@dataclass(frozen=True, slots=True)
class KvSample:
    """State of an engine at the end of a step: free blocks (evictable ones included), running and waiting requests."""

    free_blocks: int
    running: int
    waiting: int
    preempted: int


class Generator(Protocol):
    """Continues a token sequence.

    class Echo:  # samples the end-of-turn token at once
        def generate(self, token_ids, sampling, request_id):
            return self._stream()
        async def _stream(self):
            yield Delta([2], [0.0], finish="stop")
    """

    def generate(self, token_ids: Sequence[int], sampling: Sampling, request_id: str) -> AsyncGenerator[Delta, None]:
        """Deltas until one has `finish`. Raises ReplicaDied when the engine is gone; closing the generator aborts."""
        ...


class ReplicaDied(RuntimeError):
    """The engine behind a generator is dead; the request can continue elsewhere from its tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolReply:
    """What a tool answers: an outcome (see sandbox.wire.Outcome) and the text that the model reads.

    executed: something was run for it (not: refused for its form). jailed: in an isolated process.
    """

    outcome: str
    text: str
    executed: bool = True
    jailed: bool = False


class Tool(Protocol):
    """A function that the model can call by name.

    class Clock:
        name = "clock"
        async def __call__(self, arguments):
            return ToolReply(outcome="ok", text="12:00")
    """

    name: str

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolReply:
        """Never raises for what the arguments say: a wrong argument is an outcome "error" with a text for the model."""
        ...


class ToolRunner(Protocol):
    """Runs Python in isolation; `sandbox.Sandbox` is one."""

    async def run(self, code: str, stdin: str = "", limits: Limits | None = None) -> ToolResult: ...


class Reward(Protocol):
    """Grades a finished trajectory.

    class Short:  # prefers short answers
        async def __call__(self, trajectory):
            return 1.0 if trajectory.sampled_tokens < 64 else 0.0
    """

    async def __call__(self, trajectory: Trajectory) -> float:
        """A finite number. Raises GraderUnavailable when it could not grade: that is never a reward of 0."""
        ...


class GraderUnavailable(RuntimeError):
    """The grader could not run (not: the answer is wrong)."""


class Selector(Protocol):
    """Chooses which trajectories of a graded group are trained (RoC, all of them, a random subset).

    class First:
        def __call__(self, trajectories, rng):
            return list(range(len(trajectories) // 2))
    """

    def __call__(self, trajectories: Sequence[Trajectory], rng: np.random.Generator) -> list[int]:
        """Indices to keep, ascending. Pure given rng."""
        ...
