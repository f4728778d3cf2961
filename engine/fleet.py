"""The fleet of replicas: the I/O shell around the Balancer, and their supervision.

Invariants
- A turn survives the death of its replica: it goes on elsewhere from its tokens, and no token is delivered twice.
- While weights are updated nothing new is placed; afterwards every live replica has passed the canary. After an update
  that failed nothing is placed until one succeeds.
- A replica that dies is replaced in the background; the new one gets the current weights and passes the canary first.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

from engine.balance import Balancer
from engine.canary import CanaryFailed as CanaryFailed
from engine.canary import Weights as Weights
from engine.canary import compare
from engine.errors import first_error
from engine.ports import Delta, KvSample, ReplicaDied, Sampling
from engine.trace import Timeline
from engine.types import Floats


class ReplicaPort(Protocol):
    """What the fleet needs of a replica (`engine.replica.Replica`; a scripted one in tests)."""

    index: int
    died: asyncio.Event
    in_flight: int
    pid: int

    @property
    def usable_blocks(self) -> int: ...

    async def start(self) -> None: ...

    def generate(
        self, token_ids: Sequence[int], sampling: Sampling, request_id: str
    ) -> AsyncGenerator[Delta, None]: ...

    async def update_weights(self, path: str, version: int) -> None: ...

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> Floats: ...

    def stalled(self, now: float) -> bool: ...

    def kill(self) -> None: ...

    async def shutdown(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetConfig:
    """replicas: how many; block_size as in ReplicaConfig; canary_tolerance: 1e-4 for fp32, more for bf16."""

    replicas: int = 2
    block_size: int = 32
    canary_tolerance: float = 1e-4
    watch_s: float = 5.0
    restarts: int = 3
    stop_deadline_s: float = 10.0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {self.replicas}")
        if self.canary_tolerance <= 0:
            raise ValueError(f"canary_tolerance must be positive, got {self.canary_tolerance}")


class Superseded(RuntimeError):
    """New weights ended the turn: its trajectory begins again from the prompt."""


MakeReplica = Callable[[int, int | None, Callable[[int, KvSample], None]], ReplicaPort]


class Fleet:
    """`async with Fleet(...) as fleet` starts all replicas at once and ends them on the way out."""

    def __init__(
        self,
        config: FleetConfig,
        make_replica: MakeReplica,
        balancer: Balancer,
        timeline: Timeline,
        canary: Sequence[Sequence[int]] = (),
    ) -> None:
        self.config = config
        self.canary = [list(ids) for ids in canary]
        self.canary_max_abs = 0.0
        self.deaths = 0
        self.last: dict[int, KvSample] = {}
        self.kv_peak: dict[int, float] = {}  # largest share of blocks in use, until the reader clears it
        self.preemptions = 0
        self._make_replica = make_replica
        self._balancer = balancer
        self._timeline = timeline
        self._replicas: dict[int, ReplicaPort] = {}
        self._weights: Weights | None = None
        self._waiting: dict[int, asyncio.Future[ReplicaPort]] = {}
        self._homes: dict[int, int] = {}  # the replica of a trajectory's last turn
        self._tool_waiting: set[int] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._update = asyncio.Lock()
        self._scheduled = False
        self._requests = 0
        self._supervised = config.replicas
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        try:
            async with AsyncExitStack() as stack:
                group = await stack.enter_async_context(asyncio.TaskGroup())
                up = [self._loop.create_future() for _ in range(self.config.replicas)]
                for index, future in enumerate(up):
                    task = group.create_task(self._supervise(index, future), name=f"replica-{index}")
                    stack.callback(task.cancel)
                for future in up:
                    await future
                self._stack = stack.pop_all()
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stack.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures

    @property
    def version(self) -> int:
        """Version of the weights that new requests are sampled with."""
        return self._weights.version if self._weights else 0

    @property
    def live(self) -> list[int]:
        return sorted(self._replicas)

    async def turn(
        self, key: int, group: int, token_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Generates one turn of trajectory `key`: (replica, delta) until a delta has `finish`.

        The caller then says `turn_done` (it goes on) or `leave`. While no replica is up this waits; the fleet itself
        ends with ReplicaDied when none will come.
        """
        tokens = list(token_ids)
        produced = 0
        self._back_from_tool(key)
        while True:
            replica = await self._place(key, group, len(tokens))
            index, before = replica.index, produced
            request = replace(
                sampling,
                max_tokens=sampling.max_tokens - produced,
                seed=None if sampling.seed is None else sampling.seed + produced,
            )
            self._requests += 1
            self._homes[key] = index
            self._timeline.idle.running(index, 1, self._timeline.now())
            try:
                async with aclosing(replica.generate(tokens, request, f"{key}-{self._requests}")) as deltas:
                    async for delta in deltas:
                        tokens += delta.token_ids
                        produced += len(delta.token_ids)
                        spans = [(version, begin + before, end + before) for version, begin, end in delta.spans]
                        yield index, replace(delta, spans=spans) if before else delta
                        if delta.finish:
                            return
            except ReplicaDied:
                self._timeline.instant("fleet", f"replica {index} died under trajectory {key}")
                self._down(replica)
            finally:
                self._timeline.idle.running(index, -1, self._timeline.now())

    def turn_done(self, key: int, tokens: int) -> None:
        """The turn ended with tool calls."""
        self._balancer.turn_done(key, tokens, self._timeline.now())
        self._tool_waiting.add(key)
        self._timeline.idle.tools(self._homes[key], 1, self._timeline.now())
        self._schedule()

    def _back_from_tool(self, key: int) -> None:
        if key in self._tool_waiting:
            self._tool_waiting.remove(key)
            self._timeline.idle.tools(self._homes[key], -1, self._timeline.now())

    def leave(self, key: int, tokens: int, *, finished: bool) -> None:
        """The trajectory ended; finished: by itself (not: it failed or was cancelled). Idempotent."""
        self._balancer.leave(key, tokens, finished)
        self._back_from_tool(key)
        self._homes.pop(key, None)
        self._schedule()

    async def update_weights(self, weights: Weights) -> float:
        """All live replicas load the weights and pass the canary; returns the canary's largest difference.

        Raises CanaryFailed with the numbers. A replica that fails the update itself is replaced.
        """
        started = self._timeline.now()
        async with self._update:
            self._open.clear()
            self._timeline.idle.flag("weight_sync", 1, started)
            self._weights = weights
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._renew(replica, weights), name=f"update-{index}")
                        for index, replica in self._replicas.items()
                    ]
            except BaseExceptionGroup as failures:
                raise first_error(failures) from failures
            finally:
                self._timeline.idle.flag("weight_sync", -1, self._timeline.now())
            self._open.set()
            self._schedule()
        ended = self._timeline.now()
        worst = max((task.result() for task in tasks), default=0.0)
        self.canary_max_abs = max(self.canary_max_abs, worst)
        self._timeline.span("weights", f"version {weights.version}", started, ended, canary_max_abs=worst)
        return worst

    async def _renew(self, replica: ReplicaPort, weights: Weights) -> float:
        try:
            await replica.update_weights(weights.path, weights.version)
            if not self.canary:
                return 0.0
            found = await replica.logprobs(self.canary)
        except ReplicaDied as error:
            self._timeline.instant("fleet", str(error))
            self._down(replica)
            return 0.0
        return compare(replica.index, found, weights, self.config.canary_tolerance)

    async def _supervise(self, index: int, up: asyncio.Future[None]) -> None:
        """Keeps replica `index` alive: starts it, admits it, waits for its death, starts another."""
        cores = sorted(os.sched_getaffinity(0))
        core = cores[index % len(cores)]
        for attempt in range(self.config.restarts + 1):
            replica = self._make_replica(index, core, self._on_step)
            try:
                await replica.start()
                async with self._update:
                    if self._weights is not None:
                        await self._renew(replica, self._weights)
                    if not replica.died.is_set():
                        self._admit(replica)
                if not up.done():
                    up.set_result(None)
                await self._watch(replica)
            except ReplicaDied as error:
                self._timeline.instant("fleet", str(error))
                if attempt == 0:
                    raise
            finally:
                async with asyncio.timeout(self.config.stop_deadline_s):
                    await replica.shutdown()
            self.deaths += 1
        self._supervised -= 1
        if not self._supervised:
            raise ReplicaDied(f"no replica is left: each died {self.config.restarts + 1} times")

    def _admit(self, replica: ReplicaPort) -> None:
        self._replicas[replica.index] = replica
        self._timeline.idle.replica(replica.index, self._timeline.now())
        self._balancer.replica_up(replica.index, replica.usable_blocks, self.config.block_size)
        self._timeline.instant("fleet", f"replica {replica.index} up (pid {replica.pid})")
        self._schedule()

    async def _watch(self, replica: ReplicaPort) -> None:
        """Returns when the replica died; kills one that stalls, at the latest `watch_s` after its step deadline."""
        while not replica.died.is_set():
            try:
                async with asyncio.timeout(self.config.watch_s):
                    await replica.died.wait()
            except TimeoutError:
                if replica.stalled(self._timeline.now()):
                    self._timeline.instant("fleet", f"replica {replica.index} stalled: killed")
                    replica.kill()
        self._down(replica)

    def _down(self, replica: ReplicaPort) -> None:
        replica.died.set()
        if self._replicas.get(replica.index) is replica:  # else not admitted, or down already
            del self._replicas[replica.index]
            self.last.pop(replica.index, None)
            self._timeline.idle.down(replica.index, self._timeline.now())
            self._balancer.replica_down(replica.index)
            self._schedule()

    async def _place(self, key: int, group: int, tokens: int) -> ReplicaPort:
        future: asyncio.Future[ReplicaPort] = self._loop.create_future()
        self._waiting[key] = future
        self._balancer.arrive(key, group, tokens, self._timeline.now())
        self._schedule()
        self._timeline.idle.flag("kv_blocked", 1, self._timeline.now())
        try:
            return await future
        finally:
            self._timeline.idle.flag("kv_blocked", -1, self._timeline.now())
            self._waiting.pop(key, None)

    def _schedule(self) -> None:
        """One decision per loop tick, after all events of the tick."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._decide)

    def _decide(self) -> None:
        self._scheduled = False
        if not self._open.is_set():
            return
        for place in self._balancer.decide(self._timeline.now()):
            future = self._waiting.get(place.key)
            if future is not None and not future.done():
                future.set_result(self._replicas[place.replica])
                self._timeline.instant(
                    "fleet", place.rule, key=place.key, replica=place.replica, headroom_blocks=place.headroom_blocks
                )

    def _on_step(self, index: int, sample: KvSample) -> None:
        if index in self._replicas:
            self.last[index] = sample
            self.preemptions += sample.preempted
            self._balancer.sample(index, sample, self._timeline.now())
            blocks = self._replicas[index].usable_blocks
            used = blocks - sample.free_blocks
            self.kv_peak[index] = max(self.kv_peak.get(index, 0.0), used / blocks)
            self._timeline.step(index, used, sample)
            if self._waiting:
                self._schedule()
