"""Starts, watches and replaces the replicas, and keeps their weights current.

Invariants
- `weights_current` is clear while weights are updated on all replicas at once, and after a failed update until one
  succeeds. After an update every live replica has passed the canary. Where old versions stay (`on_update` is "finish")
  nothing waits, and new trajectories get a version once every live replica has it.
- A replica that dies is replaced in the background, unless it died too often; the new one gets the current weights and
  passes the canary first. One that dies while it starts is started again in the same way. `note` is told each death,
  with its cause, and each return.
- All replicas come up at least once, or the fleet does not start. A misconfigured one ends the start at once.
- When no replica is left and none will come, everybody who waits is told so.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Protocol, Self

from engine.errors import first_error
from engine.fleet.canary import Difference, compare
from engine.fleet.config import FleetConfig
from engine.fleet.cores import claimed_cores
from engine.replica.port import KvSample, ReplicaDied, ReplicaMisconfigured, ReplicaPort
from engine.telemetry.timeline import Timeline
from engine.types import PublishedWeights

log = logging.getLogger(__name__)
STEADY_S = 600.0  # a replica that served for so long died of something new
MakeReplica = Callable[[int, int | None, Callable[[int, KvSample], None]], ReplicaPort]


class Listener(Protocol):
    """What the Supervisor calls as things happen (`engine.fleet.fleet.Fleet`), in the event loop. Must not raise.

    These are calls, not a queue of events: a sample must reach the balancer before the tokens of its step reach the
    trajectories, and a replica that is down must get no placement in the same tick.
    """

    def on_up(self, replica: ReplicaPort) -> None:
        """The replica has the current weights and serves."""
        ...

    def on_down(self, replica: ReplicaPort) -> None:
        """The replica was up and no longer is."""
        ...

    def on_step(self, index: int, sample: KvSample) -> None: ...

    def on_update(self) -> None:
        """Weights of a new version are about to be loaded; `weights_current` is clear."""
        ...

    def on_none_left(self, error: ReplicaDied) -> None:
        """Every replica died too often, and none will come."""
        ...


class Supervisor:
    """Owns the replicas. `async with` starts them together and ends them."""

    def __init__(
        self,
        config: FleetConfig,
        make_replica: MakeReplica,
        timeline: Timeline,
        canary: Sequence[Sequence[int]],
        listener: Listener,
        note: Callable[[str], None] = log.warning,
    ) -> None:
        """note: called with lines for the user."""
        self.config = config
        self.canary = [list(ids) for ids in canary]
        self.canary_max_abs: float | None = None  # the largest so far; None: nothing was compared
        self.deaths = 0
        self._last_cause = ""  # why a replica died, the last time that it was known
        self._causes: dict[ReplicaPort, str] = {}  # why replicas died, as it was first known
        self._note = note
        self.live: dict[int, ReplicaPort] = {}
        self.weights: PublishedWeights | None = None
        self.weights_current = asyncio.Event()
        self.weights_current.set()
        self._make_replica = make_replica
        self._timeline = timeline
        self._listener = listener
        self._update = asyncio.Lock()
        self._rest = asyncio.Lock()
        self._starting = 0  # how many replicas are
        self._none_starting = asyncio.Event()
        self._none_starting.set()
        self._supervised = set(range(config.replicas))
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            async with AsyncExitStack() as stack:
                self._cores = stack.enter_context(claimed_cores(self.config.replicas))
                self.tasks = await stack.enter_async_context(asyncio.TaskGroup())
                up = [asyncio.get_running_loop().create_future() for _ in range(self.config.replicas)]
                for index, future in enumerate(up):
                    task = self.tasks.create_task(self._supervise(index, future), name=f"replica-{index}")
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

    def retire(self, index: int) -> ReplicaPort:
        """Returns replica `index`, which will not be replaced when it goes down.

        Raises ValueError for one that is not up, or the last one.
        """
        if index not in self.live or index not in self._supervised:
            raise ValueError(f"replica {index} is not up, but only {sorted(self.live)}")
        if len(self._supervised) == 1:
            raise ValueError(f"replica {index} is the last one, so it must stay")
        self._supervised.remove(index)
        return self.live[index]

    async def update_weights(self, weights: PublishedWeights) -> Difference | None:
        """Lets all live replicas load the weights and pass the canary, `paused_share` of them at a time.

        Returns the largest differences, or None if no replica was compared. Raises CanaryFailed with the numbers. A
        replica that fails the update itself is replaced.
        """
        async with self._update:
            started = self._timeline.now()
            old_version_stays = self.config.on_update == "finish" and self.weights is not None
            if self.config.paused_share == 1 and not old_version_stays:
                self.weights_current.clear()
            if not old_version_stays:
                self.weights = weights
            at_once = asyncio.Semaphore(max(1, int(self.config.paused_share * len(self.live))))
            try:
                with self._timeline.idle_cause("weight_sync"):
                    self._listener.on_update()
                    async with asyncio.TaskGroup() as group:
                        tasks = [
                            group.create_task(self._in_turn(replica, weights, at_once), name=f"update-{index}")
                            for index, replica in self.live.items()
                        ]
            except BaseExceptionGroup as failures:
                self.weights_current.clear()
                raise first_error(failures) from failures
            self.weights = weights
            self.weights_current.set()
        ended = self._timeline.now()
        differences = [difference for task in tasks if (difference := task.result()) is not None]
        worst = Difference(*map(max, zip(*differences, strict=True))) if differences else None
        shown = {} if worst is None else {"canary_mean_abs": worst.mean_abs, "canary_max_abs": worst.max_abs}
        if worst is not None:
            self.canary_max_abs = max(self.canary_max_abs or 0.0, worst.max_abs)
        self._timeline.span("weights", f"version {weights.version}", started, ended, **shown)
        return worst

    @asynccontextmanager
    async def rest(self) -> AsyncIterator[None]:
        """Lets the replicas sleep inside: they hold nothing of a shared device, and none starts. Waits first for one
        that is starting. They serve again after the next update.
        """
        async with self._rest:
            await self._none_starting.wait()
            async with self._update:
                self.weights_current.clear()
                await self._each(lambda replica: replica.sleep(), "sleep")
                yield
                await self._each(lambda replica: replica.wake("weights"), "wake")

    @asynccontextmanager
    async def _outside_rest(self) -> AsyncIterator[None]:
        """Lets a replica start inside, but not while the learner has the devices."""
        async with self._rest:
            self._starting += 1
            self._none_starting.clear()
        try:
            yield
        finally:
            self._starting -= 1
            if not self._starting:
                self._none_starting.set()

    async def _each(self, act: Callable[[ReplicaPort], Awaitable[None]], what: str) -> None:
        """Runs an action on all live replicas at once; a replica that fails is replaced."""

        async def one(replica: ReplicaPort) -> None:
            try:
                await act(replica)
            except ReplicaDied as error:
                self.mark_dead(replica, error)

        async with asyncio.TaskGroup() as group:
            for index, replica in self.live.items():
                group.create_task(one(replica), name=f"{what}-{index}")

    async def _in_turn(
        self, replica: ReplicaPort, weights: PublishedWeights, at_once: asyncio.Semaphore
    ) -> Difference | None:
        async with at_once:
            return await self._load_and_check(replica, weights)

    async def _load_and_check(self, replica: ReplicaPort, weights: PublishedWeights) -> Difference | None:
        """Updates one replica. Returns None if it was not compared, because there is no canary or it died."""
        began = self._timeline.now()
        try:
            await replica.update_weights(weights.path, weights.version)
            await replica.wake("kv_cache")
            loaded = self._timeline.now()
            self._timeline.span("replicas", f"load version {weights.version}", began, loaded, replica.index)
            if not self.canary:
                return None
            logprobs = await replica.logprobs([*self.canary, *weights.further])
            self._timeline.span("replicas", "canary", loaded, self._timeline.now(), replica.index)
        except ReplicaDied as error:
            self.mark_dead(replica, error)
            return None
        return compare(replica.index, logprobs, weights, self.config.canary_tolerance)

    async def _supervise(self, index: int, up: asyncio.Future[None]) -> None:
        """Keeps replica `index` alive: starts it, admits it, waits for its death, starts another."""
        deaths = 0
        while deaths <= self.config.restarts:
            replica = self._make_replica(index, self._cores[index], self._listener.on_step)
            served_since = math.inf  # it has not served yet
            try:
                async with self._outside_rest():
                    await replica.start()
                    async with self._update:
                        if self.weights is not None:
                            await self._load_and_check(replica, self.weights)
                        if not replica.died.is_set():
                            self._admit(replica)
                            served_since = self._timeline.now()
                            if deaths:
                                self._tell(f"replica {index} is up again")
                if not up.done():
                    up.set_result(None)
                await self._watch(replica)
            except ReplicaDied as error:
                self.mark_dead(replica, error)
                hopeless = isinstance(error, ReplicaMisconfigured) or deaths == self.config.restarts
                if hopeless and not up.done():
                    raise
            finally:
                await self._stop(replica)
            if index not in self._supervised:
                return
            self.deaths += 1
            deaths = 1 if self._timeline.now() - served_since > STEADY_S else deaths + 1
            cause = self._causes.pop(replica, "it did not say why")
            if deaths <= self.config.restarts:
                self._tell(f"replica {index} died: {cause}; restart {deaths} of {self.config.restarts} begins")
        self._tell(f"replica {index} died {deaths} times and is given up; the last time: {cause}")
        self._supervised.remove(index)
        if not self._supervised:
            last_cause = f"; last cause: {self._last_cause}" if self._last_cause else ""
            end = ReplicaDied(f"no replica is left: each died {self.config.restarts + 1} times{last_cause}")
            self._listener.on_none_left(end)
            raise end

    def _tell(self, line: str) -> None:
        self._timeline.instant("fleet", line)
        self._note(line)

    async def _stop(self, replica: ReplicaPort) -> None:
        try:
            async with asyncio.timeout(self.config.stop_deadline_s):
                await replica.shutdown()
        except TimeoutError:
            waited = f"did not end within {self.config.stop_deadline_s:g} s"
            self._timeline.instant("fleet", f"replica {replica.index} {waited} and is killed")
            replica.kill()

    def _admit(self, replica: ReplicaPort) -> None:
        self.live[replica.index] = replica
        self._timeline.idle.replica(replica.index, self._timeline.now())
        self._timeline.instant("fleet", f"replica {replica.index} up (pid {replica.pid})")
        self._listener.on_up(replica)

    async def _watch(self, replica: ReplicaPort) -> None:
        """Returns when the replica died. Kills one that stalls, within `watch_s` after its step deadline.

        A check that comes late by `watch_s` or more does not count: this process was stopped (Ctrl-Z, fg), and has not
        read what the engine sent meanwhile.
        """
        clock, stalled = asyncio.get_running_loop().time, None
        while not replica.died.is_set():
            began = clock()
            try:
                async with asyncio.timeout(self.config.watch_s):
                    await replica.died.wait()
            except TimeoutError:
                if clock() - began >= 2 * self.config.watch_s:
                    continue
                if cause := replica.stalled(self._timeline.now()):
                    stalled = ReplicaDied(f"replica {replica.index}: {cause}")
                    replica.kill()
        self.mark_dead(replica, stalled)

    def fail(self, error: Exception) -> None:
        """Ends the fleet for a bug in a callback, where an exception would only be logged."""
        self.tasks.create_task(_raised(error), name="failed")

    def mark_dead(self, replica: ReplicaPort, error: ReplicaDied | None = None) -> None:
        """Declares a replica dead: nothing more is placed there, and it is ended and replaced. Idempotent."""
        replica.died.set()
        if cause := replica.cause or (str(error) if error is not None else ""):
            self._last_cause = self._causes.setdefault(replica, cause)
        if error is not None:
            self._timeline.instant("fleet", str(error))
        if self.live.get(replica.index) is replica:  # otherwise it was not admitted, or is down already
            del self.live[replica.index]
            self._timeline.idle.down(replica.index, self._timeline.now())
            self._listener.on_down(replica)


async def _raised(error: Exception) -> None:
    raise error
