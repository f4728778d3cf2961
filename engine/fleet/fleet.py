"""The fleet of replicas: the I/O shell around the Balancer. Their life is the supervisor's
(engine/fleet/supervisor.py).

Invariants
- A turn survives the death of its replica, and a move: it goes on elsewhere from its tokens, no token is delivered
  twice, and a turn that ended by itself meanwhile has ended.
- A turn under which two replicas died fails: one request never takes the fleet.
- The death of a replica changes no token where sampling is seeded and the weights are the same: the request is made
  again elsewhere as it was, and what comes after the tokens that were delivered is the rest of the turn. Where an
  engine does not sample these again, or after an update, the turn goes on from them under another seed.
- While weights are updated on all replicas at once nothing begins on any of them, and after an update that failed
  nothing until one succeeds.
- A turn never waits for replicas that will not come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import count
from types import TracebackType
from typing import Self

from engine.balancing.balancer import Balancer, Place
from engine.fleet.canary import Difference
from engine.fleet.config import FleetConfig
from engine.fleet.supervisor import MakeReplica, Supervisor
from engine.replica.port import SEEDS, Delta, KvSample, ReplicaDied, ReplicaPort, Sampling
from engine.telemetry.timeline import Timeline
from engine.types import Placement, PublishedWeights

log = logging.getLogger(__name__)


class Superseded(RuntimeError):
    """Weights were updated, and by configuration the trajectory does not go on under the new ones: it begins again."""


class DeadlyTurn(ReplicaDied):
    """Two replicas died while they generated the turn. It may be what they died of, so no third one gets it."""


class _Diverged(Exception):
    """A request that was made again did not give the tokens that it gave before."""


@dataclass(slots=True)
class _Turn:
    """A turn under way. prompt_tokens: of its group. replica: where its placement or a move sends it; request: what
    generates it now, if anything does, on source; moving: that request is being aborted. decisions: about it.
    """

    group: int
    prompt_tokens: int
    decisions: list[Placement]
    placed: asyncio.Future[None] | None = None
    replica: ReplicaPort | None = None
    request: str | None = None
    source: ReplicaPort | None = None
    moving: bool = False


DEADLY = 2  # deaths of replicas under one turn
LOOK_S = 1.0  # between two decisions while turns are under way: a policy may go by the time alone


class Fleet:
    """`async with Fleet(...) as fleet` starts all replicas at once and ends them on the way out."""

    def __init__(
        self,
        config: FleetConfig,
        make_replica: MakeReplica,
        balancer: Balancer,
        timeline: Timeline,
        canary: Sequence[Sequence[int]] = (),
        note: Callable[[str], None] = log.warning,
    ) -> None:
        """note: told of each replica that dies or comes back."""
        self.config = config
        self.last: dict[int, KvSample] = {}
        self.kv_peak: dict[int, float] = {}  # largest share of blocks in use, until the reader clears it
        self.preemptions = 0
        self.prefilled = 0  # tokens of prompts computed, those of lost prefixes and preempted requests included
        self.moves = 0
        self._balancer = balancer
        self._timeline = timeline
        self._supervisor = Supervisor(config, make_replica, timeline, canary, self, note)
        self._turns: dict[int, _Turn] = {}
        self._homes: dict[int, int] = {}  # the replica of a trajectory's last turn
        self._born: dict[int, int] = {}  # the version of its first token, where that binds it
        self._tool_waiting: set[int] = set()
        self._drained: dict[int, asyncio.Event] = {}  # set when nothing runs there any more
        self._ended: ReplicaDied | None = None
        self._scheduled = False
        self._held = False
        self._later: asyncio.TimerHandle | None = None  # the next decision if nothing happens
        self._requests = 0
        self._keys = count(1)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await self._supervisor.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on_none_left(ReplicaDied("the fleet has ended"))
        await self._supervisor.__aexit__(kind, error, trace)

    def new_key(self) -> int:
        """The key of a trajectory that begins."""
        return next(self._keys)

    @property
    def version(self) -> int:
        """Version of the weights that new requests are sampled with."""
        return self._supervisor.weights.version if self._supervisor.weights else 0

    @property
    def weights(self) -> PublishedWeights | None:
        """What the replicas have, or are about to."""
        return self._supervisor.weights

    @property
    def live(self) -> list[int]:
        return sorted(self._supervisor.live)

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """(room, free): of the KV caches of all live replicas."""
        live = self._supervisor.live
        free = {index: replica.usable_blocks for index, replica in live.items()}
        room = sum(free.values())
        free |= {index: sample.free_blocks for index, sample in self.last.items() if index in live}
        return room * self.config.block_size, sum(free.values()) * self.config.block_size

    @property
    def deaths(self) -> int:
        return self._supervisor.deaths

    @property
    def canary_max_abs(self) -> float | None:
        """The largest difference of log-probabilities that a canary has shown so far; None before the first."""
        return self._supervisor.canary_max_abs

    async def update_weights(self, weights: PublishedWeights) -> Difference | None:
        """All live replicas load them and pass the canary; returns its largest differences, None where none was
        compared. Raises CanaryFailed.
        """
        worst = await self._supervisor.update_weights(weights)
        self._schedule()
        return worst

    def hold(self, on: bool) -> None:
        """While it is on no turn begins and none is moved; those that have begun go on."""
        self._held = on
        if not on:
            self._schedule()

    def rest(self) -> AbstractAsyncContextManager[None]:
        """The replicas sleep inside, for a learner that shares their devices; they serve again after the next
        `update_weights`. Raises ValueError while a trajectory is under way.
        """
        under_way = len(self._turns) + len(self._tool_waiting)
        if under_way:
            raise ValueError(f"a fleet rests when no trajectory is under way, {under_way} are")
        return self._supervisor.rest()

    async def turn(
        self,
        key: int,
        group: int,
        token_ids: Sequence[int],
        sampling: Sampling,
        prompt_tokens: int | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        decisions: list[Placement] | None = None,
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Generates one turn of trajectory `key` (a `new_key`): (replica, delta) until a delta has `finish`.

        token_ids may grow while the turn is generated, but what it holds at the call must stay; its first prompt_tokens
        (None: all) are the group's. The caller then calls `turn_finished` (it goes on) or `trajectory_ended`. Waits for
        a place inside `waiting()`. decisions: gets those about this turn as they are made. Raises ReplicaDied when none
        will come, Superseded when the trajectory must begin again (`FleetConfig.on_update`): the caller calls
        `trajectory_ended` first. Raises DeadlyTurn when a second replica dies under it, and GrammarRefused.
        """
        size = len(token_ids)
        produced: list[int] = []
        spans: list[tuple[int, int, int]] = []
        self._back_from_tool(key)
        decisions = [] if decisions is None else decisions
        turn = self._turns[key] = _Turn(group, size if prompt_tokens is None else prompt_tokens, decisions)
        deadly: list[int] = []  # replicas that died under it
        begin = 0  # of the request: how many tokens were produced before it
        version = self._version_of(key)  # of the request
        try:
            while True:
                with waiting():
                    replica = await self._place(turn, key, size + len(produced))
                if self._version_of(key) != version:
                    begin = len(produced)
                    version = self._version_of(key)
                tokens = [*token_ids[:size], *produced[:begin]] if produced else token_ids
                request_id = self._begin(key, turn, replica)
                deltas = replica.generate(tokens, replace(_rest(sampling, begin), version=version), request_id)
                if begin < len(produced):
                    deltas = self._undelivered(deltas, produced[begin:], key, version)
                try:
                    async with aclosing(deltas):
                        async for delta in deltas:
                            produced += delta.token_ids
                            if delta.finish is None:
                                yield replica.index, delta
                                continue
                            spans += [(number, begin + first, begin + end) for number, first, end in delta.spans]
                            if delta.finish != "abort":
                                yield replica.index, replace(delta, spans=tuple(spans)) if begin else delta
                                return
                            if delta.token_ids:
                                yield replica.index, replace(delta, finish=None, spans=())
                            if not turn.moving:  # an engine that ends by itself aborts what it has
                                raise ReplicaDied(f"replica {replica.index} aborted a request that nobody moves")
                            begin = len(produced)
                            break
                except ReplicaDied as error:
                    self._supervisor.mark_dead(replica, error)
                    if replica.index not in self._drained:  # else it was ended on purpose
                        deadly.append(replica.index)
                    if len(deadly) == DEADLY:
                        ends = f"replica {deadly[0]} and then replica {deadly[1]} died while they generated this turn"
                        raise DeadlyTurn(f"{ends}, so no third one gets it; last heard: {error}") from error
                except _Diverged:
                    begin = len(produced)
                finally:
                    self._end(turn, replica)
        finally:
            del self._turns[key]

    async def _undelivered(
        self, deltas: AsyncGenerator[Delta, None], delivered: Sequence[int], key: int, version: int
    ) -> AsyncGenerator[Delta, None]:
        """The deltas of a request that is made again, without the tokens that it gave the first time.

        Raises _Diverged when it gives others (a batch of another shape may round a log-probability the other way), or
        when its weights are not `version` any more.
        """
        given = 0  # of the delivered ones
        async with aclosing(deltas):
            async for delta in deltas:
                again = list(delivered[given : given + len(delta.token_ids)])
                given += len(again)
                if again:
                    early = given < len(delivered) and delta.finish not in (None, "abort")
                    if early or self._version_of(key) != version or list(delta.token_ids[: len(again)]) != again:
                        raise _Diverged
                new = replace(
                    delta.without_first(len(again)),
                    spans=[(number, max(begin, given), end) for number, begin, end in delta.spans if end > given],
                )
                if new.token_ids or new.finish is not None:
                    yield new

    def turn_finished(self, key: int, tokens: int) -> None:
        """The turn ended with tool calls."""
        self._balancer.turn_finished(key, tokens, self._timeline.now())
        self._tool_waiting.add(key)
        self._timeline.idle.tools(self._homes[key], 1, self._timeline.now())
        self._schedule()

    def trajectory_ended(self, key: int, tokens: int, *, finished: bool) -> None:
        """The trajectory ended; finished: by itself (not: it failed or was cancelled). Idempotent."""
        self._balancer.trajectory_ended(key, tokens, finished)
        self._back_from_tool(key)
        self._homes.pop(key, None)
        self._born.pop(key, None)
        self._schedule()

    async def drain(self, index: int) -> None:
        """Ends a replica for good when its turns have ended or were moved; what is left there after `drain_s` goes on
        elsewhere. Raises ValueError for one that is not up, or the last.
        """
        replica = self._supervisor.retire(index)
        empty = self._drained[index] = asyncio.Event()
        self._balancer.replica_drain(index)
        self._schedule()
        if replica.in_flight:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.config.drain_s):
                    await empty.wait()
        self._supervisor.mark_dead(replica)

    def _version_of(self, key: int) -> int:
        """Returns the version of the weights that a trajectory is sampled with next."""
        return self._born.get(key, self.version) if self.config.on_update == "finish" else self.version

    def _back_from_tool(self, key: int) -> None:
        if key in self._tool_waiting:
            self._tool_waiting.remove(key)
            self._timeline.idle.tools(self._homes[key], -1, self._timeline.now())

    async def _place(self, turn: _Turn, key: int, tokens: int) -> ReplicaPort:
        """Where the turn goes on: where a move sent it, else where the balancer places it. No update is under way."""
        while True:
            if self._ended is not None:
                raise ReplicaDied(str(self._ended))
            if self.config.on_update == "restart" and self._born.get(key, self.version) != self.version:
                raise Superseded(f"trajectory {key} began under version {self._born[key]}, now it is {self.version}")
            if turn.replica is not None and turn.replica.died.is_set():
                self._supervisor.mark_dead(turn.replica)
                turn.replica = None
            if turn.replica is None:
                await self._placed(turn, key, tokens)
            elif self._supervisor.weights_current.is_set():
                if self.config.on_update != "continue":
                    self._born.setdefault(key, self.version)
                return turn.replica
            else:
                await self._supervisor.weights_current.wait()

    async def _placed(self, turn: _Turn, key: int, tokens: int) -> None:
        placed = turn.placed = self._loop.create_future()
        self._balancer.request_turn(key, turn.group, turn.prompt_tokens, tokens, self._timeline.now())
        self._schedule()
        await asyncio.sleep(0)  # the decision: only what it leaves waiting is blocked
        if not placed.done():
            with self._timeline.idle_cause("kv_blocked"):
                await placed

    def _begin(self, key: int, turn: _Turn, replica: ReplicaPort) -> str:
        self._requests += 1
        self._homes[key] = replica.index
        self._timeline.idle.running(replica.index, 1, self._timeline.now())
        turn.request = f"{key}-{self._requests}"
        turn.source = replica
        turn.moving = False
        return turn.request

    def _end(self, turn: _Turn, replica: ReplicaPort) -> None:
        turn.request = None
        self._timeline.idle.running(replica.index, -1, self._timeline.now())
        if replica.index in self._drained and not replica.in_flight:
            self._drained[replica.index].set()

    def _schedule(self) -> None:
        """One decision per loop tick, after all events of the tick."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._decide)

    def _decide(self) -> None:
        self._scheduled = False
        if self._later is not None:
            self._later.cancel()
        if self._ended is not None or self._held or not self._supervisor.weights_current.is_set():
            return
        try:
            for place in self._balancer.decide(self._timeline.now()):
                turn = self._turns.get(place.key)
                if turn is not None:  # else it was closed in this tick
                    self._note(turn, place)
                    self._send(turn, self._supervisor.live[place.replica])
        except Exception as error:
            error.add_note(f"in the balancer {type(self._balancer).__name__}, or in what its decide() answered")
            self._supervisor.fail(error)
            return
        self._later = self._loop.call_later(LOOK_S, self._schedule) if self._turns else None

    def _note(self, turn: _Turn, place: Place) -> None:
        self._timeline.instant("fleet", place.rule, **place.reasons())
        turn.decisions.append(
            Placement(
                at=self._timeline.now(),
                replica=place.replica,
                rule=place.rule,
                headroom_blocks=float(place.headroom_blocks),
                stay_s=float(place.stay_s),
                go_s=float(place.go_s),
                free_blocks={index: sample.free_blocks for index, sample in self.last.items()},
            )
        )

    def _send(self, turn: _Turn, replica: ReplicaPort) -> None:
        """The turn goes on there: now if it waits, else from the tokens that it has when its request has ended."""
        turn.replica = replica
        self._wake(turn)
        if turn.request is not None and not turn.moving:
            self.moves += 1
            self._interrupt(turn, turn.request)

    def _wake(self, turn: _Turn) -> None:
        if turn.placed is not None and not turn.placed.done():
            turn.placed.set_result(None)

    def _interrupt(self, turn: _Turn, request_id: str) -> None:
        assert turn.source is not None
        turn.moving = True
        self._supervisor.tasks.create_task(self._abort(turn.source, request_id), name=f"abort-{request_id}")

    async def _abort(self, replica: ReplicaPort, request_id: str) -> None:
        try:
            await replica.abort(request_id)
        except ReplicaDied as error:
            self._timeline.instant("fleet", str(error))
            self._supervisor.mark_dead(replica)

    # What the supervisor calls (engine.fleet.supervisor.Listener)

    def on_up(self, replica: ReplicaPort) -> None:
        self._balancer.replica_up(replica.index, replica.usable_blocks, self.config.block_size)
        self._schedule()

    def on_down(self, replica: ReplicaPort) -> None:
        self.last.pop(replica.index, None)
        self._balancer.replica_down(replica.index)
        self._schedule()

    def on_step(self, index: int, sample: KvSample) -> None:
        replica = self._supervisor.live.get(index)
        if replica is None:
            return
        self.last[index] = sample
        self.preemptions += sample.preempted
        self.prefilled += sample.prefilled
        try:
            self._balancer.sample(index, sample, self._timeline.now())
        except Exception as error:
            self._supervisor.fail(error)
        used = replica.usable_blocks - sample.free_blocks
        self.kv_peak[index] = max(self.kv_peak.get(index, 0.0), used / replica.usable_blocks)
        self._timeline.step(index, used, sample)
        if self._turns:
            self._schedule()

    def on_update(self) -> None:
        if self.config.on_update != "restart":
            return
        for key, turn in self._turns.items():
            if self._born.get(key, self.version) == self.version:
                continue
            if turn.request is not None and not turn.moving:
                self._interrupt(turn, turn.request)
            self._wake(turn)

    def on_none_left(self, error: ReplicaDied) -> None:
        self._ended = self._ended or error
        if self._later is not None:
            self._later.cancel()
        self._supervisor.weights_current.set()
        for turn in self._turns.values():
            self._wake(turn)


def _rest(sampling: Sampling, produced: int) -> Sampling:
    """What is left of a turn after `produced` tokens, which its grammar has taken already."""
    if not produced:
        return sampling
    seed = None if sampling.seed is None else (sampling.seed + produced) % SEEDS
    return replace(
        sampling,
        max_tokens=sampling.max_tokens - produced,
        seed=seed,
        grammar_tokens=0 if sampling.grammar is None else sampling.grammar_tokens + produced,
    )
