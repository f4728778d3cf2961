"""Puts the engines under load: bare, and below rollouts whose tools answer at once, late, or out of a jail.

All modes generate the same token schedule: a jailed run records it (turn lengths, seeds, what each program answered),
and the others repeat it. A turn of the bare mode is the same request with its length fixed; a trajectory takes the
replica with the fewest and stays there.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.measuring.processes import cpu_seconds
from engine.ports import ToolRunner
from engine.replica.port import Sampling
from engine.replica.replica import Replica
from engine.rollout.rollout import Rollouts, derive_seed
from engine.types import Prompt, Trajectory
from sandbox.wire import Limits, ToolResult


class Recorder:
    """A ToolRunner that asks another one, and remembers what each program answered."""

    def __init__(self, runner: ToolRunner) -> None:
        self.runner = runner
        self.answers: dict[tuple[str, str], ToolResult] = {}

    async def run(
        self, code: str, stdin: str = "", limits: Limits | None = None, *, display: bool = False
    ) -> ToolResult:
        result = self.answers[code, stdin] = await self.runner.run(code, stdin, limits, display=display)
        return result


class Repeater:
    """A ToolRunner that gives recorded answers after delay_s. A program without one prints nothing, and is counted."""

    def __init__(self, answers: dict[tuple[str, str], ToolResult], delay_s: float = 0.0) -> None:
        self.answers = answers
        self.delay_s = delay_s
        self.unknown = 0

    async def run(
        self, code: str, stdin: str = "", limits: Limits | None = None, *, display: bool = False
    ) -> ToolResult:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        answer = self.answers.get((code, stdin))
        self.unknown += answer is None
        return answer or ToolResult(outcome="ok", stdout="")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One request of the schedule: how many tokens, and the ids that come after them."""

    tokens: int
    seed: int
    given: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The requests of one trajectory."""

    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...]

    @classmethod
    def of(cls, trajectory: Trajectory, seed: int) -> Schedule:
        """Makes the schedule of a recorded trajectory of a run with this seed."""
        ids = trajectory.token_ids_T.tolist()
        starts = [*(turn.start for turn in trajectory.turns[1:]), len(ids)]
        turns = [
            Turn(
                tokens=turn.end - turn.start,
                seed=derive_seed(seed, trajectory.prompt.id, trajectory.sample, number),
                given=tuple(ids[turn.end : following]),
            )
            for number, (turn, following) in enumerate(zip(trajectory.turns, starts, strict=True))
        ]
        return cls(prompt_ids=tuple(ids[: trajectory.turns[0].start]), turns=tuple(turns))


@dataclass(slots=True)
class Measured:
    """One run of one mode. cpu_s: CPU of all processes; frontend_s: CPU of this one. unknown: as of `Repeater`."""

    wall_s: float
    cpu_s: float
    frontend_s: float
    tokens: int
    trajectories: list[Trajectory] = field(default_factory=list)
    unknown: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.tokens / self.cpu_s


async def bare(replicas: Sequence[Replica], schedules: Sequence[Schedule], concurrent: int) -> Measured:
    """Generates the schedule by `Replica.generate` alone: no fleet, no chat, no parser, no tools."""
    running = [0] * len(replicas)

    async def one(number: int, schedule: Schedule) -> int:
        ids, tokens = list(schedule.prompt_ids), 0
        home = running.index(min(running))
        running[home] += 1
        for at, turn in enumerate(schedule.turns):
            sampling = Sampling(
                max_tokens=turn.tokens,
                temperature=1.0,
                seed=turn.seed,
                stop_token_ids=(),
                ignore_eos=True,
                deliver_at=frozenset(),
            )
            async for delta in replicas[home].generate(ids, sampling, f"bare-{number}-{at}"):
                ids += delta.token_ids
            ids += turn.given
            tokens += turn.tokens
        running[home] -= 1
        return tokens

    measured, tokens = await _measure([_bind(one, pair) for pair in enumerate(schedules)], concurrent)
    measured.tokens = sum(tokens)
    return measured


async def rolled(rollouts: Rollouts, prompts: Sequence[Prompt], samples: int, concurrent: int) -> Measured:
    """Generates the same trajectories by Rollouts: `samples` of each prompt."""

    async def one(group: int, sample: int) -> Trajectory:
        return await rollouts.run(prompts[group], sample, group)

    jobs = [_bind(one, (group, sample)) for group in range(len(prompts)) for sample in range(samples)]
    measured, trajectories = await _measure(jobs, concurrent)
    measured.trajectories = trajectories
    measured.tokens = sum(trajectory.sampled_tokens for trajectory in trajectories)
    return measured


def _bind(function: Callable[..., Awaitable[Any]], arguments: Iterable[Any]) -> Callable[[], Awaitable[Any]]:
    return lambda: function(*arguments)


async def _measure(jobs: Sequence[Callable[[], Awaitable[Any]]], concurrent: int) -> tuple[Measured, list[Any]]:
    """Runs the jobs in their order, `concurrent` at a time. Returns their results in the same order."""
    results: list[Any] = [None] * len(jobs)
    pending = iter(enumerate(jobs))

    async def work() -> None:
        for at, job in pending:
            results[at] = await job()

    wall_s, cpu_s, frontend_s = time.perf_counter(), _tree_cpu_s(), time.process_time()
    async with asyncio.TaskGroup() as tasks:
        for number in range(min(concurrent, len(jobs))):
            tasks.create_task(work(), name=f"load-{number}")
    frontend_s = time.process_time() - frontend_s
    wall_s, cpu_s = time.perf_counter() - wall_s, _tree_cpu_s() - cpu_s
    return Measured(wall_s=wall_s, cpu_s=cpu_s, frontend_s=frontend_s, tokens=0), results


def _tree_cpu_s() -> float:
    return sum(cpu_seconds(os.getpid()).values())
