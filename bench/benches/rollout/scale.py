"""Runs thousands of trajectories on one event loop, with replicas that step like engines but only repeat a script.

A step comes every step_s and gives each running request one token. Tokens leave in bundles, as
`engine.replica.output_bundler` makes them, and bundles are handed out AT_ONCE at a time with a turn of the loop
between, as `engine.replica.token_streams` does. Each trajectory calls a tool once, waits for it and answers; turns
differ in length.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np

from bench.benches.rollout.load import Repeater
from bench.measuring.bench import BenchFailed
from engine.balancing.kv_aware import KvAware
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.replica.output_bundler import AT_ONCE
from engine.replica.port import Delta, KvSample, ReplicaPort, Sampling
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.telemetry.timeline import Timeline
from engine.tools.python_tool import PythonTool
from recipes.tiny.task import prompts, tool_call
from sandbox.wire import ToolResult

REPLICAS = 8
RUNNING = 512  # trajectories that a replica's KV cache holds, all together 4,096
QUEUED = 16_384
STEP_S = 0.1
BLOCK_SIZE = 32
MAX_TOKENS = 256
SAMPLES = 16
TOOL_S = 0.05


@dataclass(slots=True, eq=False)
class _Request:
    tokens: Iterator[tuple[int, bool]]
    length: int
    deliver_at: frozenset[int]
    bundle: int
    held: list[tuple[int, bool]] = field(default_factory=list)
    ready: list[tuple[int, bool]] = field(default_factory=list)
    wake: asyncio.Future[None] | None = None

    def step(self) -> bool:
        """Takes a step. Returns whether a bundle leaves the engine now."""
        token, last = next(self.tokens, (-1, False))
        if token < 0:
            return False
        self.length += 1
        self.held.append((token, last))
        if len(self.held) < self.bundle and not last and token not in self.deliver_at:
            return False
        self.ready += self.held
        self.held.clear()
        return True


class SteppingReplica:
    """Does what the fleet needs of a replica; `drive` is its engine."""

    def __init__(self, index: int, on_step: Callable[[int, KvSample], None], chat: ChatTemplate) -> None:
        self.index = index
        self.died = asyncio.Event()
        self.in_flight = 0
        self.pid = 0
        self.usable_blocks = round(RUNNING * MAX_TOKENS / BLOCK_SIZE / 0.85)
        self._on_step = on_step
        self._end = chat.end_of_turn
        self._call = [chat._encode(tool_call(f"print({n})")) for n in range(10)]
        self._text = chat._encode("I think about it. " * 40)
        self._requests: set[_Request] = set()

    async def start(self) -> None: ...

    async def shutdown(self) -> None:
        self.died.set()

    def stalled(self, now: float) -> str | None:
        return None

    async def abort(self, request_id: str) -> None: ...

    def _turn(self, token_ids: Sequence[int], seed: int) -> Iterator[tuple[int, bool]]:
        text = self._text[: 10 + seed % 31]
        first = token_ids.count(self._end) < 2  # the prompt holds one
        tokens = [*text, *(self._call[seed % 10] if first else ()), self._end]
        return zip(tokens, [*[False] * (len(tokens) - 1), True], strict=True)

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, request_id: str
    ) -> AsyncGenerator[Delta, None]:
        assert sampling.seed is not None
        assert sampling.deliver_at is not None
        request = _Request(self._turn(token_ids, sampling.seed), len(token_ids), sampling.deliver_at, sampling.bundle)
        self._requests.add(request)
        self.in_flight += 1
        try:
            while True:
                if not request.ready:
                    request.wake = asyncio.get_running_loop().create_future()
                    await request.wake
                ready, request.ready = request.ready, []
                finish = "stop" if ready[-1][1] else None
                yield Delta([token for token, _ in ready], [-1.0] * len(ready), finish, 32)
                if finish:
                    return
        finally:
            self.in_flight -= 1
            self._requests.discard(request)

    async def drive(self, step_s: float) -> None:
        """Steps until it is cancelled. The replicas are out of step with each other, as engines are."""
        await asyncio.sleep(self.index * step_s / REPLICAS)
        while True:
            await asyncio.sleep(step_s)
            running = list(self._requests)
            leaving = [request for request in running if request.step()]
            for start in range(0, len(leaving), AT_ONCE):
                for request in leaving[start : start + AT_ONCE]:
                    if request.wake is not None and not request.wake.done():
                        request.wake.set_result(None)
                await asyncio.sleep(0)
            used = sum(request.length // BLOCK_SIZE + 1 for request in running)
            self._on_step(self.index, KvSample(max(0, self.usable_blocks - used), len(running), 0, 0))


@dataclass(slots=True)
class Lags:
    """How late the loop is, in wall seconds and in CPU seconds of this process, which other load does not prolong.

    peak_bytes: the most memory that this process had at any look.
    """

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    async def tick(self, every_s: float = 0.005) -> None:
        while True:
            if len(self.wall_s) % 20 == 0:
                self.peak_bytes = max(self.peak_bytes, resident_bytes())
            due, cpu = time.perf_counter() + every_s, time.process_time()
            await asyncio.sleep(every_s)
            self.wall_s.append(max(0.0, time.perf_counter() - due))
            self.cpu_s.append(max(0.0, time.process_time() - cpu - every_s))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def scale(
    checkpoint: Path, queued: int = QUEUED, replica_count: int = REPLICAS, step_s: float = STEP_S
) -> dict[str, float]:
    """Runs replica_count x RUNNING + queued trajectories at once. Raises BenchFailed where anything is left over."""
    chat, timeline = ChatTemplate.load(checkpoint), Timeline()
    replicas: list[SteppingReplica] = []

    def make(index: int, core: int | None, on_step: Callable[[int, KvSample], None]) -> ReplicaPort:
        replicas.append(SteppingReplica(index, on_step, chat))
        return cast(ReplicaPort, replicas[-1])  # it has no weights and does not sleep

    total, tasks_before = replica_count * RUNNING + queued, len(asyncio.all_tasks())
    problems = list(islice(prompts("train", 0), total // SAMPLES))
    balancer, lags, ended = KvAware(MAX_TOKENS), Lags(), 0
    async with Fleet(FleetConfig(replicas=replica_count), make, balancer, timeline) as fleet:
        tool = PythonTool(Repeater({("print(1)", ""): ToolResult(outcome="ok", stdout="1")}, TOOL_S))
        rollouts = Rollouts(RolloutConfig(max_tokens=MAX_TOKENS, deadline_s=3600), chat, fleet, [tool], timeline, 0)

        async def one(number: int) -> None:
            nonlocal ended
            await rollouts.run(problems[number // SAMPLES], number % SAMPLES, number // SAMPLES)
            ended += 1

        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 1_000_000)
        memory = resident_bytes()
        async with asyncio.TaskGroup() as engines:
            async with asyncio.TaskGroup() as tasks:
                for number in range(total):
                    tasks.create_task(one(number), name=f"trajectory-{number}")
                    if number % AT_ONCE == 0:
                        await asyncio.sleep(0)
                await asyncio.sleep(0.1)
                started = resident_bytes() - memory
                cpu_s, wall_s = time.process_time(), time.perf_counter()
                driving = [
                    engines.create_task(replica.drive(step_s), name=f"drive-{replica.index}") for replica in replicas
                ]
                driving += [engines.create_task(lags.tick(), name="lags")]
            cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
            for task in driving:
                task.cancel()
        turns_left = len(fleet._turns)
    tokens, tasks_left = rollouts.tokens_sampled, len(asyncio.all_tasks()) - tasks_before
    if (ended, turns_left, tasks_left) != (total, 0, 0):
        raise BenchFailed(f"{ended} of {total} trajectories ended; left over: {turns_left} turns, {tasks_left} tasks")
    return {
        "lag_p99_s": float(np.percentile(lags.wall_s, 99)),
        "lag_cpu_p99_s": float(np.percentile(lags.cpu_s, 99)),
        "lag_max_s": max(lags.wall_s),
        "trajectory_bytes": started / total,
        "trajectory_peak_bytes": (lags.peak_bytes - memory) / total,
        "trajectories": ended,
        "tokens_per_s": tokens / wall_s,
        "cpu_per_token_s": cpu_s / tokens,
    }
