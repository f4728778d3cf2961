"""Replays a trace on a fleet: every turn is generated with the length that the trace says, and tools are slept.

Legend: tokens of a trajectory = prompt + tool replies + generated. A trajectory of n tokens leaves the KV of n - 1 of
them in the cache (its last token was sampled, not computed), of which whole blocks can be used again: `held`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.placement.workload import Traced, Turn
from engine.balancing.balancer import Balancer
from engine.fleet.fleet import Fleet
from engine.replica.port import KvSample, Sampling


@dataclass(frozen=True, slots=True)
class Step:
    """A replica's KV sample, t seconds after the run began. steps: how many engine steps it stands for."""

    replica: int
    t: float
    free_blocks: int
    running: int
    waiting: int
    preempted: int
    prefilled: int
    steps: int = 1


@dataclass(slots=True)
class Record:
    """What happened in a run. prompt, cached, lost: tokens, summed over all requests (starts of turns and moves).

    lost: those of the `held` tokens that were not in the engine's cache, so that they were computed again.
    """

    block_size: int
    began: float = field(default_factory=time.perf_counter)
    steps: list[Step] = field(default_factory=list)
    requests: int = 0
    prompt: int = 0
    cached: int = 0
    lost: int = 0
    moves: int = 0  # those that the balancer ordered in the middle of a turn
    rehomed: int = 0  # turns that began on another replica than the turn before
    generated: int = 0
    completed_s: list[float] = field(default_factory=list)  # since the run began, when all are submitted
    homes: dict[int, int] = field(default_factory=dict)  # the last replica of each trajectory

    def now(self) -> float:
        return time.perf_counter() - self.began

    def sample(self, replica: int, sample: KvSample) -> None:
        self.steps.append(
            Step(
                replica,
                self.now(),
                sample.free_blocks,
                sample.running,
                sample.waiting,
                sample.preempted,
                sample.prefilled,
                sample.steps,
            )
        )

    def request(self, tokens: int, held: int, cached: int) -> None:
        """Counts a request of `tokens` tokens that begins to answer; the trajectory's KV was `held` tokens long."""
        self.requests += 1
        self.prompt += tokens
        self.cached += cached
        self.lost += max(0, held - cached)

    def held(self, tokens: int) -> int:
        return (tokens - 1) // self.block_size * self.block_size

    @property
    def makespan_s(self) -> float:
        return max(self.completed_s, default=0.0)

    @property
    def preemptions(self) -> int:
        return sum(step.preempted for step in self.steps)

    @property
    def prefilled(self) -> int:
        return sum(step.prefilled for step in self.steps)

    @property
    def recomputed(self) -> int:
        """Counts tokens computed twice: lost prefixes (a moved trajectory's too), and tokens that the engine prefilled
        beyond the requests that answered (for preempted ones, and for one that was moved before its first token).
        """
        return self.lost + max(0, self.prefilled - (self.prompt - self.cached))

    @property
    def prefix_hits(self) -> float:
        """Returns the share of the requests' tokens that were in the cache."""
        return self.cached / max(1, self.prompt)

    def spread(self, blocks: int) -> float:
        """Returns the largest difference of the replicas' free shares, as a mean over time."""
        free: dict[int, int] = {}
        total = last = 0.0
        difference = 0
        for step in self.steps:
            total += difference * (step.t - last)
            last = step.t
            free[step.replica] = step.free_blocks
            difference = max(free.values()) - min(free.values())
        return total / max(last, 1e-9) / blocks


class Timed:
    """A Balancer that counts the CPU seconds spent in it."""

    def __init__(self, policy: Balancer) -> None:
        self._policy = policy
        self.cpu_s = 0.0
        self.decisions = 0
        self.decide_s = 0.0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._policy, name)

        def timed(*arguments: Any) -> Any:
            started = time.thread_time()
            try:
                return method(*arguments)
            finally:
                self._count(name, time.thread_time() - started)

        setattr(self, name, timed)
        return timed

    def _count(self, name: str, seconds: float) -> None:
        self.cpu_s += seconds
        if name == "decide":
            self.decisions += 1
            self.decide_s += seconds


def prompt_ids(seed: int, group: int, count: int, vocabulary: int) -> list[int]:
    return np.random.default_rng((seed, group)).integers(3, vocabulary, count).tolist()


async def replay(fleet: Fleet, traces: Sequence[Traced], record: Record, seed: int, vocabulary: int) -> None:
    """Submits every trajectory at once and returns when all are done. Raises AssertionError for a wrong length."""
    record.began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for trace in traces:
            group.create_task(_trajectory(fleet, trace, record, seed, vocabulary), name=f"trajectory-{trace.traj}")
    record.moves = fleet.moves


async def _trajectory(fleet: Fleet, trace: Traced, record: Record, seed: int, vocabulary: int) -> None:
    ids = prompt_ids(seed, trace.group, trace.turns[0].prompt_new_tokens, vocabulary)
    replies = np.random.default_rng((seed, trace.group, trace.traj))
    held = 0
    try:
        for number, turn in enumerate(trace.turns):
            if number:
                held = record.held(len(ids))
                ids += replies.integers(3, vocabulary, turn.prompt_new_tokens).tolist()
            await _turn(fleet, trace, turn, ids, held, record)
            if number + 1 < len(trace.turns):
                fleet.turn_finished(trace.traj, len(ids))
                await asyncio.sleep(turn.tool_latency_s)
        assert len(ids) == trace.total_tokens, f"{len(ids)} tokens instead of those of {trace}"
    finally:
        fleet.trajectory_ended(trace.traj, len(ids), finished=len(ids) == trace.total_tokens)
    record.completed_s.append(record.now())


async def _turn(fleet: Fleet, trace: Traced, turn: Turn, ids: list[int], held: int, record: Record) -> None:
    """Generates the turn, which follows `ids`, of which `held` tokens may be in the cache of a replica."""
    sampling = Sampling(max_tokens=turn.gen_tokens, temperature=1.0, seed=None, stop_token_ids=(), ignore_eos=True)
    home = None
    async with aclosing(fleet.turn(trace.traj, trace.group, ids, sampling)) as deltas:
        async for replica, delta in deltas:
            if home is None:
                record.request(len(ids), held, delta.cached_tokens)
                record.rehomed += record.homes.get(trace.traj, replica) != replica
            elif replica != home:
                record.request(len(ids), record.held(len(ids)), delta.cached_tokens)
            home = record.homes[trace.traj] = replica
            record.generated += len(delta.token_ids)
            ids += delta.token_ids
