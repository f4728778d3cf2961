"""What the engine needs from outside, as Protocols. Anything of the right shape fits; nothing is inherited.

The small ones show an implementation of at most 20 lines; `tests/contracts/` holds a check per Protocol that a user
can run on an implementation of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np

from engine.types import Floats, Trajectory
from sandbox.wire import Limits, Outcome, ToolResult

OUTCOMES = (*get_args(Outcome), "malformed")  # of a ToolReply


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How one turn is sampled. max_tokens bounds the turn; seed is per (run, prompt, sample, turn).

    ignore_eos: the model's own end token does not end the turn (a bench replays a length). deliver_at: tokens that are
    delivered as they come; others, but the first of the turn, may wait for one of these. None: none waits.
    """

    max_tokens: int
    temperature: float
    seed: int | None
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool = False
    deliver_at: frozenset[int] | None = None


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
    """State of an engine at the end of a step: free blocks (evictable ones included), running and waiting requests.

    preempted: requests that lost their blocks in this step. prefilled: tokens of prompts that it computed, those of
    preempted requests and of lost prefixes included. steps: how many steps the sample stands for, 1 on a live engine; a
    simulator jumps over steps between which nothing begins or ends. preempted and prefilled are sums over them.
    """

    free_blocks: int
    running: int
    waiting: int
    preempted: int
    prefilled: int = 0
    steps: int = 1


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


class ReplicaMisconfigured(ReplicaDied):
    """The engine did not start, and another attempt would fail in the same way: what it was given is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolReply:
    """What a tool answers: an outcome (one of OUTCOMES) and the text that the model reads.

    executed: something was run for it (not: refused for its form). jailed: in an isolated process.
    """

    outcome: str
    text: str
    executed: bool = True
    jailed: bool = False

    def __post_init__(self) -> None:  # said now: any outcome but "ok" would count as the model's error
        if self.outcome not in OUTCOMES or not isinstance(self.text, str):
            raise ValueError(f"ToolReply: outcome in {OUTCOMES}, text a string; got {self.outcome!r} and {self.text!r}")


class Superseded(RuntimeError):
    """Weights were updated, and by configuration the trajectory does not go on under the new ones: it begins again."""


class ReplicaPort(Protocol):
    """An engine as the fleet uses it (`engine.replica.replica.Replica`; a scripted one in tests). Its methods raise
    ReplicaDied when the engine is gone.
    """

    index: int
    died: asyncio.Event
    in_flight: int
    pid: int

    @property
    def usable_blocks(self) -> int: ...

    async def start(self) -> None:
        """Raises ReplicaMisconfigured where another attempt would fail in the same way."""
        ...

    def generate(
        self, token_ids: Sequence[int], sampling: Sampling, request_id: str
    ) -> AsyncGenerator[Delta, None]: ...

    async def abort(self, request_id: str) -> None:
        """The request's stream ends with finish "abort" after the tokens that it has; nothing if it has ended."""
        ...

    async def update_weights(self, path: str, version: int) -> None: ...

    async def sleep(self) -> None:
        """Gives up what it holds of a shared device. No request is in flight, and none comes before it is awake."""
        ...

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Takes one part back: first the weights, which hold nothing before the next update, then the KV cache."""
        ...

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> Floats: ...

    def stalled(self, now: float) -> bool: ...

    def kill(self) -> None: ...

    async def shutdown(self) -> None: ...


class Tool(Protocol):
    """A function that the model can call by name.

    class Clock:
        name = "clock"
        async def __call__(self, arguments):
            return ToolReply(outcome="ok", text="12:00")

    It may have a `description` and `parameters`, a JSON schema of the arguments: what the chat template shows the model
    of it. `engine.rollout.python_tool.schema` says what is shown in their absence.
    """

    name: str

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolReply:
        """Never raises for what the arguments say: a wrong argument is an outcome "error" with a text for the model.

        The model gets the text whole: it is the tool that keeps it short (`engine.rollout.python_tool.clip`).
        """
        ...


class StatefulTool(Protocol):
    """A tool that gives each trajectory one of its own, with a state of its own.

    class Steps:  # counts the calls of a trajectory
        name = "step"
        @asynccontextmanager
        async def open(self):
            yield Step()
    class Step:
        name, count = "step", 0
        async def __call__(self, arguments):
            self.count += 1
            return ToolReply(outcome="ok", text=str(self.count))

    `description` and `parameters` may stand here as in a `Tool`.
    """

    name: str

    def open(self) -> AbstractAsyncContextManager[Tool]:
        """Entered when a trajectory begins, left when it has ended or was cancelled, not when it changes replicas.

        Trajectories that never call enter it too, so a costly start belongs into the first call. Leaving must end by
        itself: the trajectory's deadline does not cover it. Calls of one turn start in their order and may overlap.
        """
        ...


class ToolRunner(Protocol):
    """Runs Python in isolation, each call by itself; `sandbox.Sandbox` is one."""

    async def run(
        self, code: str, stdin: str = "", limits: Limits | None = None, *, display: bool = False
    ) -> ToolResult:
        """display: code without output shows its last expression in `ToolResult.display`."""
        ...


class Session(Protocol):
    """Runs Python cells that share their variables, one after the other in the order of the calls."""

    async def run(self, code: str, stdin: str = "", limits: Limits | None = None) -> ToolResult:
        """`ToolResult.session_state` says whether the variables are there."""
        ...


class SessionRunner(Protocol):
    """Opens sessions; `sandbox.Sandbox` is one."""

    def session(self) -> AbstractAsyncContextManager[Session]: ...


class Reward(Protocol):
    """Grades a finished trajectory.

    class Short:  # prefers short answers
        async def __call__(self, trajectory):
            return 1.0 if trajectory.sampled_tokens < 64 else 0.0
    """

    async def __call__(self, trajectory: Trajectory) -> float:
        """A finite number; above 0 the answer counts as correct (in accuracies, and for RoC). Raises GraderUnavailable
        when it could not grade: that is never a reward of 0.
        """
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
