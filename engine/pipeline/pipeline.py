"""The pipeline runtime: stages joined by channels under one TaskGroup, each of them measured.

Invariants
- A stage is any coroutine function `async def stage(inbox, outbox)`; it ends when its inbox is closed and drained.
  If it ended earlier, the stages before it would wait for ever; that is an error.
- A stage's outbox closes when all its workers have ended, so that the end travels down the pipeline by itself.
- A stage that has enough calls `inbox.finish()`: the stages before it are cancelled, the items in its inbox are
  discarded, and the stages after it end as usual.
- An exception in any worker cancels the whole pipeline and propagates unchanged (a bug stops the node).
- With leases, a group is never lost: the pipeline raises GroupVanished if a stage ends with groups that it did not put
  out, and `watch` does so as soon as nothing can move any more.
- For each worker: busy + blocked on input + blocked on output = the time since it started
  (`engine.pipeline.worker_clock`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine import clock as run_clock
from engine.errors import add_note, first_error
from engine.pipeline.channel import Channel, ChannelClosed
from engine.pipeline.leases import Leases
from engine.pipeline.own_tasks import OwnTasks, tasks_noted
from engine.pipeline.whereabouts import FIX, GroupVanished, StageState, is_dead, missing
from engine.pipeline.worker_clock import PERIODS, Period, Periods, WorkerClock
from engine.user_parts import call
from sandbox.require import at_least, require

LOOK_S = 1.0
LOOKS = 3  # so many in a row must see the same dead state, since a callback of the loop may be about to act


class Port:
    """One worker's end of a channel. waits: is told how many tasks more wait here, fewer if negative."""

    def __init__(self, channel: Channel[Any], waits: Callable[[int], None]) -> None:
        self._channel = channel
        self._waits = waits
        self.items = 0
        self._pending = 0  # tasks that wait here, since a stage may use its port from several
        self._waiting: asyncio.Task[Any] | None = None  # the last of them

    def holds_up(self, task: asyncio.Task[Any]) -> bool:
        """Returns whether this task waits here, and no other does."""
        return self._pending == 1 and self._waiting is task

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the worker counts as blocked here: it can only wait, for a lease for example."""
        self._pending += 1
        self._waits(1)
        try:
            yield
        finally:
            self._pending -= 1
            self._waits(-1)

    async def _wait(self, operation: Awaitable[Any]) -> Any:
        self._waiting = asyncio.current_task()
        with self.waiting():
            item = await operation
        self.items += 1
        return item


class Inbox(Port):
    """`async for item in inbox`, or `await inbox.get()`, which raises ChannelClosed at the end."""

    def __init__(
        self,
        channel: Channel[Any],
        waits: Callable[[int], None],
        finish: Callable[[], None],
        taken: Callable[[Any], None] = lambda item: None,
    ) -> None:
        super().__init__(channel, waits)
        self._finish, self._taken = finish, taken

    def finish(self) -> None:
        """Cancels the stages before this one and discards the items in the inbox: this stage wants no more."""
        self._finish()

    async def get(self) -> Any:
        item = await self._wait(self._channel.get())
        self._taken(item)
        return item

    async def __aiter__(self) -> AsyncIterator[Any]:
        with contextlib.suppress(ChannelClosed):
            while True:
                yield await self.get()


class Outbox(Port):
    """`await outbox.put(item)` waits for room downstream."""

    def __init__(
        self, channel: Channel[Any], waits: Callable[[int], None], check: Callable[[Any], None] = lambda item: None
    ) -> None:
        super().__init__(channel, waits)
        self._check = check

    async def put(self, item: Any) -> None:
        """Raises ValueError for an item that the next stage cannot take, or a group that this stage does not have."""
        self._check(item)
        await self._wait(self._channel.put(item))


StageFunction = Callable[[Inbox, Outbox], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of a pipeline: `workers` concurrent copies of `run`, and room for `capacity` items in its inbox.

    takes: the type of the items that it can work on. collects: whether it holds groups until others have come.
    """

    name: str
    run: StageFunction
    workers: int = 1
    capacity: int = 16
    takes: type = object
    collects: bool = False

    def __post_init__(self) -> None:
        require(f"stage {self.name}: workers", self.workers, at_least(1))


@dataclass(frozen=True, kw_only=True, slots=True)
class StageStats:
    """Seconds summed over the workers of a stage; queue is the number of items waiting in front of it."""

    name: str
    workers: int
    items_in: int
    items_out: int
    busy_s: float
    blocked_in_s: float
    blocked_out_s: float
    queue: int

    @property
    def items(self) -> int:
        """How many items it took; the first stage takes none and puts out its own."""
        return self.items_in or self.items_out


class _Worker:
    """A worker of a stage. Its own task creates it."""

    def __init__(self, inbox: Inbox, outbox: Outbox, clock: WorkerClock) -> None:
        self.inbox, self.outbox, self.clock = inbox, outbox, clock
        self.has_ended = False
        self.own = OwnTasks()

    @property
    def waits(self) -> bool:
        """Whether it has ended or waits for an item."""
        return self.has_ended or self.inbox.holds_up(self.own.worker)


class Pipeline:
    """Runs stages in a row. The last stage's output is discarded; the first stage's inbox is empty and closed.

    >>> async def numbers(inbox, outbox):
    ...     for n in range(3):
    ...         await outbox.put(n)
    >>> async def show(inbox, outbox):
    ...     async for n in inbox:
    ...         print(n)
    >>> import asyncio
    >>> asyncio.run(Pipeline([Stage(name="numbers", run=numbers), Stage(name="show", run=show)]).run())
    0
    1
    2
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        clock: Callable[[], float] = run_clock.now,
        *,
        leases: Leases | None = None,
        works: Callable[[str, bool], None] = lambda stage, does: None,
    ) -> None:
        """leases: the leases of the groups; if given, each group is tracked through the stages.

        works: is called with the name of a stage and True when it begins to work, and with False when it waits.
        """
        names = [stage.name for stage in stages]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a pipeline needs stages with distinct names, got {names}")
        self.stages = list(stages)
        self._leases = leases
        self._finished = False  # whether a stage has called `inbox.finish()`
        self._clock = clock  # not the loop's: uvloop counts in whole milliseconds
        self._channels: list[Channel[Any]] = [Channel(stage.capacity, stage.name) for stage in stages]
        self._channels.append(_Sink())
        self._channels[0].close()
        self._periods_done: deque[Period] = deque(maxlen=PERIODS)
        self._periods = [
            Periods(stage.name, index, self._periods_done, partial(works, stage.name))
            for index, stage in enumerate(stages)
        ]
        self._workers: list[list[_Worker]] = [[] for _ in stages]
        self._tasks: list[list[asyncio.Task[None]]] = [[] for _ in stages]

    async def run(self) -> None:
        """Returns when the last stage has ended; raises the first exception of a stage (ExceptionGroup unwrapped)."""
        try:
            with tasks_noted():
                await self._run()
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index, stage in enumerate(self.stages):
                for number in range(stage.workers):
                    task = group.create_task(self._work(index), name=f"{stage.name}[{number}]")
                    self._tasks[index].append(task)

    async def watch(self, look_s: float = LOOK_S) -> None:
        """Watches the run until cancelled. Raises GroupVanished when nothing can move any more (`is_dead`)."""
        seen, looks = self._passed(), 0
        while True:
            await asyncio.sleep(look_s)
            looks = looks + 1 if self._is_dead() and self._passed() == seen else 0
            seen = self._passed()
            if looks == LOOKS:
                raise GroupVanished(f"{self._missing() or 'no stage can move any more'}. {FIX}")

    def states(self) -> list[StageState]:
        """Returns the state of each stage, for `whereabouts.is_dead`."""
        return [self._state(index) for index in range(len(self.stages))]

    def _state(self, index: int) -> StageState:
        stage, workers = self.stages[index], self._workers[index]
        holds = len(self._leases.whereabouts.within(stage.name)) if self._leases is not None else 0
        return StageState(
            name=stage.name,
            queue=len(self._channels[index]),
            waits=len(workers) == stage.workers and all(worker.waits for worker in workers),
            holds=holds,
            may_act=holds > 0 and any(worker.own.under_way for worker in workers),
        )

    def _is_dead(self) -> bool:
        leases = self._leases
        return leases is not None and leases.waiting and is_dead(self.states(), waits_for_lease=True)

    def _passed(self) -> list[tuple[int, int]]:
        """Returns the number of items in and out of each stage."""
        return [(row.items_in, row.items_out) for row in self.stats()]

    def _missing(self) -> str:
        """Returns which stages have swallowed groups. Those that collect groups are left out: they wait for others."""
        rows = [row for row, stage in zip(self.stats(), self.stages, strict=True) if not stage.collects]
        return "; ".join(filter(None, map(self._swallowed, rows)))

    def _swallowed(self, row: StageStats) -> str:
        prompts = self._leases.whereabouts.within(row.name) if self._leases is not None else []
        if not prompts:
            return ""
        return missing(row.name, items_in=row.items_in, items_out=row.items_out, prompts=prompts)

    def _taken(self, index: int, item: Any) -> None:
        if self._leases is not None:
            self._leases.whereabouts.taken(self.stages[index].name, item)

    def _check(self, index: int, item: Any) -> None:
        """Notes that the stage puts an item out. Raises ValueError if it may not."""
        name = self.stages[index].name
        if isinstance(item, list) and not item:
            raise ValueError(f"stage {name} put out an empty list. Fix: put out the groups of each step that it takes")
        if index + 1 < len(self.stages) and not isinstance(item, (following := self.stages[index + 1]).takes):
            raise ValueError(
                f"stage {name} put out {item!r:.100} ({type(item).__name__}), and stage {following.name} takes a "
                f"{following.takes.__name__}. Fix: put out what {following.name} can take"
            )
        if self._leases is not None:
            self._leases.whereabouts.put(name, item, source=index == 0)

    async def _work(self, index: int) -> None:
        clock = WorkerClock(self._clock, self._periods[index])
        inbox = Inbox(
            self._channels[index],
            clock.waits_for_input,
            finish=lambda: self._finish(index),
            taken=lambda item: self._taken(index, item),
        )
        outbox = Outbox(self._channels[index + 1], clock.waits_for_room, check=lambda item: self._check(index, item))
        worker = _Worker(inbox, outbox, clock)
        self._workers[index].append(worker)
        try:
            await call("stage", self.stages[index].run, worker.inbox, worker.outbox)
        except Exception as error:
            add_note(error, f"in the stage {self.stages[index].name}")
            raise
        finally:
            worker.clock.end()
        worker.has_ended = True
        peers = self._workers[index]
        if len(peers) == self.stages[index].workers and all(peer.has_ended for peer in peers):
            if not self._finished and (swallowed := self._swallowed(self.stats()[index])):
                raise GroupVanished(f"{swallowed}, and the stage has ended. {FIX}")
            self._channels[index + 1].close()
            if not self._channels[index].closed or len(self._channels[index]):
                raise RuntimeError(f"stage {self.stages[index].name} ended before its inbox was closed and drained")

    def _finish(self, index: int) -> None:
        self._finished = True
        for tasks in self._tasks[:index]:
            for task in tasks:
                task.cancel()
        self._channels[index].close()
        self._channels[index].clear()

    def stats(self) -> list[StageStats]:
        rows = []
        for stage, channel, workers in zip(self.stages, self._channels, self._workers, strict=False):
            seconds = [worker.clock.seconds() for worker in workers]
            rows.append(
                StageStats(
                    name=stage.name,
                    workers=stage.workers,
                    items_in=sum(worker.inbox.items for worker in workers),
                    items_out=sum(worker.outbox.items for worker in workers),
                    busy_s=sum(each["busy"] for each in seconds),
                    blocked_in_s=sum(each["in"] for each in seconds),
                    blocked_out_s=sum(each["out"] for each in seconds),
                    queue=len(channel),
                )
            )
        return rows

    def drain_periods(self) -> list[Period]:
        """Returns the periods in which stages worked since the last call, in no order."""
        now = self._clock()
        for periods in self._periods:
            periods.cut(now)
        drained = list(self._periods_done)
        self._periods_done.clear()
        return drained


class _Sink(Channel[Any]):
    """The channel behind the last stage. It takes every item and keeps none."""

    def __init__(self) -> None:
        super().__init__(1, "sink")

    async def put(self, item: Any) -> None:
        return None
