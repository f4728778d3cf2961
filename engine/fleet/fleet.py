"""The fleet of replicas: the I/O shell around the Balancer. The supervisor starts, watches and replaces the replicas
(engine/fleet/supervisor.py).

Invariants
- A turn survives a move and the death of its replica: it continues elsewhere from its tokens, and no token is delivered
  twice. A turn that ended by itself meanwhile has ended.
- A turn under which two replicas died fails, so that one request never takes down the fleet.
- The death of a replica changes no token if sampling is seeded and the weights are the same: the same request is made
  again elsewhere, and what it samples after the tokens that were delivered is the rest of the turn. If it samples other
  tokens than those, or weights were updated, the turn continues from its tokens under another seed.
- While weights are updated on all replicas at once, nothing begins on any of them. After a failed update nothing begins
  until one succeeds.
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
from engine.replica.port import MOST_TOP, SEEDS, Delta, KvSample, ReplicaDied, ReplicaPort, Sampling
from engine.telemetry.timeline import Timeline
from engine.types import Placement, PublishedWeights, TokenScores

log = logging.getLogger(__name__)


class Superseded(RuntimeError):
    """Weights were updated, and the configuration says that the trajectory begins again (`FleetConfig.on_update`)."""


class DeadlyTurn(ReplicaDied):
    """Two replicas died while they generated the turn. It may have killed them, so no third one gets it."""


class _Diverged(Exception):
    """A repeated request did not give the tokens that it gave before."""


@dataclass(slots=True)
class _Turn:
    """A turn in progress. prompt_tokens: its group's. replica: where its placement or a move sends it. request: the one
    that generates it now, if any, on `source`. moving: that request is being aborted. decisions: its placements.
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
LOOK_S = 1.0  # at most, between two decisions while turns are under way: a policy may depend on the time alone


class Fleet:
    """All replicas as one generator. `async with` starts them together and ends them."""

    def __init__(
        self,
        config: FleetConfig,
        make_replica: MakeReplica,
        balancer: Balancer,
        timeline: Timeline,
        canary: Sequence[Sequence[int]] = (),
        note: Callable[[str], None] = log.warning,
    ) -> None:
        """note: called with a line when a replica dies or comes back."""
        self.config = config
        self.last: dict[int, KvSample] = {}
        self.kv_peak: dict[int, float] = {}  # largest share of blocks in use since the reader last cleared it
        self.preemptions = 0
        self.prefilled = 0  # prompt tokens computed, those of lost prefixes and preempted requests included
        self.moves = 0
        self._balancer = balancer
        self._timeline = timeline
        self._supervisor = Supervisor(config, make_replica, timeline, canary, self, note)
        self._turns: dict[int, _Turn] = {}
        self._homes: dict[int, int] = {}  # the replica of a trajectory's last turn
        self._first_version: dict[int, int] = {}  # for trajectories that stay with the version they began under
        self._tool_waiting: set[int] = set()
        self._drained: dict[int, asyncio.Event] = {}  # set when nothing runs there any more
        self._up = asyncio.Event()  # set while a replica is up, and when none will come
        self._ended: ReplicaDied | None = None
        self._scheduled = False
        self._held = False
        self._next_look: asyncio.TimerHandle | None = None  # the next decision if nothing happens
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
        """Returns the key for a new trajectory."""
        return next(self._keys)

    @property
    def version(self) -> int:
        """Version of the weights that new requests are sampled with."""
        return self._supervisor.weights.version if self._supervisor.weights else 0

    @property
    def weights(self) -> PublishedWeights | None:
        """The weights that the replicas have or are about to load."""
        return self._supervisor.weights

    @property
    def live(self) -> list[int]:
        return sorted(self._supervisor.live)

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """(capacity, free) tokens of the KV caches of all live replicas."""
        live = self._supervisor.live
        free_blocks = {index: replica.usable_blocks for index, replica in live.items()}
        capacity_blocks = sum(free_blocks.values())
        free_blocks |= {index: sample.free_blocks for index, sample in self.last.items() if index in live}
        return capacity_blocks * self.config.block_size, sum(free_blocks.values()) * self.config.block_size

    @property
    def kv_used(self) -> dict[int, float]:
        """The share of its KV blocks that each live replica used at its last step; only of those that made one."""
        live = self._supervisor.live
        samples = {index: sample for index, sample in self.last.items() if index in live}
        return {index: 1 - sample.free_blocks / live[index].usable_blocks for index, sample in samples.items()}

    @property
    def requests(self) -> dict[int, int]:
        """The number of requests that each live replica has."""
        return {index: replica.in_flight for index, replica in self._supervisor.live.items()}

    @property
    def deaths(self) -> int:
        return self._supervisor.deaths

    @property
    def canary_max_abs(self) -> float | None:
        """The largest difference of log-probabilities that a canary has shown so far; None before the first."""
        return self._supervisor.canary_max_abs

    async def update_weights(self, weights: PublishedWeights) -> Difference | None:
        """Lets all live replicas load the weights and pass the canary. Returns the largest differences, or None if no
        replica was compared. Raises CanaryFailed.
        """
        worst = await self._supervisor.update_weights(weights)
        self._schedule()
        return worst

    def hold(self, on: bool) -> None:
        """Stops placements while on: no turn begins and none is moved. Turns that have begun continue."""
        self._held = on
        if not on:
            self._schedule()

    def rest(self) -> AbstractAsyncContextManager[None]:
        """Lets the replicas sleep inside, for a learner that shares their devices. They serve again after the next
        `update_weights`. Raises ValueError while a trajectory is under way.
        """
        under_way = len(self._turns) + len(self._tool_waiting)
        if under_way:
            raise ValueError(f"a fleet can rest only when no trajectory is under way, and {under_way} are")
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
        """Generates one turn of trajectory `key` (a `new_key`). Yields (replica, delta) until a delta has `finish`.

        token_ids may grow while the turn is generated, but what it holds at the call must stay; its first prompt_tokens
        (None: all) are the group's. The turn waits for a place inside `waiting()`. decisions: gets the placements of
        the turn as they are made. Afterwards the caller calls `turn_finished` if the trajectory waits for tools, else
        `trajectory_ended`.

        Raises ReplicaDied if no replica will come, DeadlyTurn if a second one dies under the turn, GrammarRefused,
        and Superseded if the trajectory must begin again; then the caller calls `trajectory_ended` first.
        """
        size = len(token_ids)
        produced: list[int] = []
        spans: list[tuple[int, int, int]] = []
        self._back_from_tool(key)
        decisions = [] if decisions is None else decisions
        turn = self._turns[key] = _Turn(group, size if prompt_tokens is None else prompt_tokens, decisions)
        died: list[int] = []  # replicas that died under the turn
        begin = 0  # tokens that were produced before the request
        version = self._version_of(key)  # the request's
        try:
            while True:
                with waiting():
                    replica = await self._place(turn, key, size + len(produced))
                if self._version_of(key) != version:
                    begin = len(produced)
                    version = self._version_of(key)
                tokens = [*token_ids[:size], *produced[:begin]] if produced else token_ids
                request_id = self._begin(key, turn, replica)
                deltas = replica.generate(tokens, _rest(sampling, begin, version), request_id)
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
                            if not turn.moving:  # an engine that ends by itself aborts its requests
                                raise ReplicaDied(f"replica {replica.index} aborted a request that nobody moves")
                            begin = len(produced)
                            break
                except ReplicaDied as error:
                    self._supervisor.mark_dead(replica, error)
                    if replica.index not in self._drained:  # a drained one was ended on purpose
                        died.append(replica.index)
                    if len(died) == DEADLY:
                        deaths = f"replica {died[0]} and then replica {died[1]} died while they generated this turn"
                        raise DeadlyTurn(f"{deaths}, so no third one gets it; last cause: {error}") from error
                except _Diverged:
                    begin = len(produced)
                finally:
                    self._end(turn, replica)
        finally:
            del self._turns[key]

    async def _undelivered(
        self, deltas: AsyncGenerator[Delta, None], delivered: Sequence[int], key: int, version: int
    ) -> AsyncGenerator[Delta, None]:
        """Yields the deltas of a repeated request, without the tokens that it gave the first time.

        Raises _Diverged if it gives others (a batch of another shape may round a log-probability the other way), or if
        its weights are not `version` any more.
        """
        repeated = 0  # how many of the delivered tokens have come again
        async with aclosing(deltas):
            async for delta in deltas:
                expected = list(delivered[repeated : repeated + len(delta.token_ids)])
                repeated += len(expected)
                if expected:
                    early = repeated < len(delivered) and delta.finish not in (None, "abort")
                    same = list(delta.token_ids[: len(expected)]) == expected
                    if early or self._version_of(key) != version or not same:
                        raise _Diverged
                new = replace(
                    delta.without_first(len(expected)),
                    spans=[(number, max(begin, repeated), end) for number, begin, end in delta.spans if end > repeated],
                )
                if new.token_ids or new.finish is not None:
                    yield new

    async def score(self, token_ids: Sequence[int], start: int, top: int = 0) -> TokenScores:
        """Returns what the model gives the tokens from `start` on (`engine.replica.port.ReplicaPort.score`).

        The replica with the fewest requests scores them; the balancer is not asked, since nothing stays there. Raises
        ReplicaDied if no replica will come, DeadlyTurn if a second one dies meanwhile, and ValueError for a sequence
        that the engine refuses.
        """
        if not 1 <= start <= len(token_ids):
            raise ValueError(f"start must be from 1 to the {len(token_ids)} tokens of the sequence, got {start}")
        if not 0 <= top <= MOST_TOP:
            raise ValueError(f"top must be from 0 to {MOST_TOP}, got {top}")
        if start == len(token_ids):
            return TokenScores.none(0, top)
        died = 0
        while True:
            replica = await self._any_replica()
            try:
                return await replica.score(token_ids, start, top)
            except ReplicaDied as error:
                self._supervisor.mark_dead(replica, error)
                died += 1
                if died == DEADLY:
                    raise DeadlyTurn(
                        f"{DEADLY} replicas died while they scored a sequence; last cause: {error}"
                    ) from error

    async def _any_replica(self) -> ReplicaPort:
        """Waits for a replica with current weights, and returns the one with the fewest requests."""
        while True:
            await self._up.wait()
            if self._ended is not None:
                raise ReplicaDied(str(self._ended))
            if self._supervisor.weights_current.is_set():
                return min(self._supervisor.live.values(), key=lambda replica: (replica.in_flight, replica.index))
            await self._supervisor.weights_current.wait()

    def turn_finished(self, key: int, tokens: int) -> None:
        """Notes that a turn ended with tool calls."""
        self._balancer.turn_finished(key, tokens, self._timeline.now())
        self._tool_waiting.add(key)
        self._timeline.idle.tools(self._homes[key], 1, self._timeline.now())
        self._schedule()

    def trajectory_ended(self, key: int, tokens: int, *, finished: bool) -> None:
        """Notes that a trajectory ended. finished: by itself, so it neither failed nor was cancelled. Idempotent."""
        self._balancer.trajectory_ended(key, tokens, finished)
        self._back_from_tool(key)
        self._homes.pop(key, None)
        self._first_version.pop(key, None)
        self._schedule()

    async def drain(self, index: int) -> None:
        """Ends a replica for good once its turns have ended or moved. Turns that remain after `drain_s` continue
        elsewhere. Raises ValueError for a replica that is not up, or the last one.
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
        return self._first_version.get(key, self.version) if self.config.on_update == "finish" else self.version

    def _back_from_tool(self, key: int) -> None:
        if key in self._tool_waiting:
            self._tool_waiting.remove(key)
            self._timeline.idle.tools(self._homes[key], -1, self._timeline.now())

    async def _place(self, turn: _Turn, key: int, tokens: int) -> ReplicaPort:
        """Returns the replica on which the turn continues: where a move sent it, otherwise where the balancer places
        it. Waits until no update is under way.
        """
        while True:
            if self._ended is not None:
                raise ReplicaDied(str(self._ended))
            first = self._first_version.get(key, self.version)
            if self.config.on_update == "restart" and first != self.version:
                raise Superseded(f"trajectory {key} began under version {first}, now it is {self.version}")
            if turn.replica is not None and turn.replica.died.is_set():
                self._supervisor.mark_dead(turn.replica)
                turn.replica = None
            if turn.replica is None:
                await self._wait_for_placement(turn, key, tokens)
            elif self._supervisor.weights_current.is_set():
                if self.config.on_update != "continue":
                    self._first_version.setdefault(key, self.version)
                return turn.replica
            else:
                await self._supervisor.weights_current.wait()

    async def _wait_for_placement(self, turn: _Turn, key: int, tokens: int) -> None:
        placed = turn.placed = self._loop.create_future()
        self._balancer.request_turn(key, turn.group, turn.prompt_tokens, tokens, self._timeline.now())
        self._schedule()
        await asyncio.sleep(0)  # lets the balancer decide: only a turn that still waits then counts as blocked
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
        """Schedules one decision per loop tick, after all events of the tick."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._decide)

    def _decide(self) -> None:
        self._scheduled = False
        if self._next_look is not None:
            self._next_look.cancel()
        if self._ended is not None or self._held or not self._supervisor.weights_current.is_set():
            return
        try:
            for place in self._balancer.decide(self._timeline.now()):
                turn = self._turns.get(place.key)
                if turn is not None:  # otherwise it was closed in this tick
                    self._record(turn, place)
                    self._send(turn, self._supervisor.live[place.replica])
        except Exception as error:
            error.add_note(f"in the balancer {type(self._balancer).__name__}, or in what its decide() returned")
            self._supervisor.fail(error)
            return
        self._next_look = self._loop.call_later(LOOK_S, self._schedule) if self._turns else None

    def _record(self, turn: _Turn, place: Place) -> None:
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
        """Sends the turn to a replica: now if it waits, otherwise with its tokens so far once its request has ended."""
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
            self._supervisor.mark_dead(replica, error)

    # The supervisor calls these (engine.fleet.supervisor.Listener).

    def on_up(self, replica: ReplicaPort) -> None:
        self._up.set()
        self._balancer.replica_up(replica.index, replica.usable_blocks, self.config.block_size)
        self._schedule()

    def on_down(self, replica: ReplicaPort) -> None:
        if not self._supervisor.live and self._ended is None:
            self._up.clear()
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
            if self._first_version.get(key, self.version) == self.version:
                continue
            if turn.request is not None and not turn.moving:
                self._interrupt(turn, turn.request)
            self._wake(turn)

    def on_none_left(self, error: ReplicaDied) -> None:
        self._ended = self._ended or error
        self._up.set()
        if self._next_look is not None:
            self._next_look.cancel()
        self._supervisor.weights_current.set()
        for turn in self._turns.values():
            self._wake(turn)


def _rest(sampling: Sampling, produced: int, version: int) -> Sampling:
    """Returns how the rest of a turn is sampled after `produced` tokens, which its grammar has taken already, and under
    which version of the weights.
    """
    if not produced:
        return sampling if sampling.version == version else replace(sampling, version=version)
    seed = None if sampling.seed is None else (sampling.seed + produced) % SEEDS
    return replace(
        sampling,
        version=version,
        max_tokens=sampling.max_tokens - produced,
        seed=seed,
        grammar_tokens=0 if sampling.grammar is None else sampling.grammar_tokens + produced,
    )
