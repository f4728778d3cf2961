"""The pool of a host: runs calls in the slots of its jails, one jail for each tier, and keeps sessions.

Invariants
- Every submitted call is answered once: with the kernel's verdict, or as "lost" if its slot or jail died under it or
  could not start. Calls that are open when `run` ends are not answered.
- At most `slots` calls run at once. Calls of a tier start in the order of `submit`, and so do cells of a session.
- A cell runs only on the state that it expects: if its session is not here at that state, the answer is "lost".
- A tier's jail starts with the first call that needs it, the first tier's with the pool; one that ends is started again
  by the next call. One that fails several times in a row is not tried again for PAUSE_S.
- A jail that has served `recycle_calls` is replaced, so that no zygote's address layout serves for ever. Its sessions
  live on in it, and it ends with the last of them.
- Beyond `session_memory_bytes`, or without a free index, the least recently used idle session ends.
- The index of a slot or session (its uid, its control group) is used again when nothing of it remains.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection

from sandbox import wire
from sandbox.host import nsjail
from sandbox.host.queues import SessionQueue, Sessions, Starts, TierQueue
from sandbox.host.slots import START_S, Indexes, SlotHandle, TierJail
from sandbox.printable import printable
from sandbox.tiers import Tier

WATCH_S = 1.0
RECYCLE_CALLS = 100_000
LOST = wire.ToolResult(outcome="lost")
LOST_STATE = wire.ToolResult(outcome="lost", session_state="lost")
Queue = TierQueue | SessionQueue


class Pool:
    def __init__(
        self,
        *,
        make_jail: Callable[[Tier], TierJail],
        level: str,
        tiers: tuple[Tier, ...],
        slots: int,
        session_memory_bytes: float,
        answer: Callable[[int, wire.ToolResult], None],
        recycle_calls: int = RECYCLE_CALLS,
    ) -> None:
        self.ready = asyncio.Event()
        self.level = level
        self._make_jail, self._tiers = make_jail, {tier.name: tier for tier in tiers}
        self._slots, self._answer, self._recycle_calls = slots, answer, recycle_calls
        self._jails: dict[str, TierJail] = {}  # new slots and sessions come from them
        self._all_jails: set[TierJail] = set()  # also those that are being replaced
        self._starts = {tier.name: Starts() for tier in tiers}
        self._queues = {tier.name: TierQueue(tier.name) for tier in tiers}
        self._sessions = Sessions(session_memory_bytes)
        self._busy: set[Queue] = set()  # those in which calls wait
        self._owners: dict[SlotHandle, Queue] = {}  # for every slot that is not discarded
        self._indexes = Indexes()
        self._running = self._arrived = 0
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Serves until `stop`. Raises JailUnavailable if the first tier's jail cannot start."""
        async with asyncio.TaskGroup() as self._group:
            self._start_up()
            try:
                while not self._over.done():
                    await asyncio.wait((self._over,), timeout=WATCH_S)
                    self._watch()
            finally:
                self.stop()
                for tier_jail in list(self._all_jails):
                    tier_jail.stop()
        self._over.result()

    def stop(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def submit(self, call: wire.RunRequest) -> None:
        if self._over.done():
            return
        self._arrived += 1
        queue = self._queues.get(call.tier) if call.step is None else self._session_queue(call, call.step)
        if queue is None:  # also for a tier that the hello did not name
            self._answer(call.id, LOST if call.step is None else LOST_STATE)
            return
        queue.waiting.append((self._arrived, call))
        self._busy.add(queue)
        self._fill()

    def cancel(self, ids: Collection[int]) -> None:
        ids = set(ids)
        for slot in list(self._owners):
            if slot.call is not None and slot.call.id in ids:
                slot.cancel()
        for queue in list(self._busy):
            taken = queue.take_out(ids)
            for id in taken:
                self._answer(id, wire.ToolResult(outcome="killed"))
            if taken and isinstance(queue, SessionQueue) and queue.script:
                self._end_session(queue)  # half built, and nobody waits for it
        self._fill()

    def end_sessions(self, sessions: Collection[bytes]) -> None:
        for id in sessions:
            if (queue := self._sessions.get(id)) is not None:
                self._end_session(queue)
        self._fill()

    # jails

    def _start_up(self) -> None:
        """Forks slots of the first tier until one is ready; then the host can say hello."""
        first = next(iter(self._queues.values()))
        if self._over.done() or self.ready.is_set() or first.starting:
            return
        if first.idle:
            self.ready.set()
            return
        for _ in range(self._slots):
            self._fork(first)

    def _jail(self, tier: str) -> TierJail | None:
        """Returns the tier's jail, started if there is none; None while one is ending."""
        tier_jail = self._jails.get(tier)
        if tier_jail is None:
            tier_jail = self._jails[tier] = self._make_jail(self._tiers[tier])
            self._all_jails.add(tier_jail)
            self._group.create_task(self._run_jail(tier_jail), name=f"sandbox-jail-{tier}")
        return None if tier_jail.over.done() else tier_jail

    async def _run_jail(self, tier_jail: TierJail) -> None:
        """Runs a jail, and answers the calls that end with it."""
        log = await tier_jail.run()
        self._all_jails.discard(tier_jail)
        if self._over.done():
            return
        tier = tier_jail.tier.name
        if self._jails.get(tier) is tier_jail:
            del self._jails[tier]
        for slot in list(tier_jail.slots):
            self._slot_died(slot)
        report = f"{tier_jail.reason}\n{log}".strip()
        if tier_jail.served and report:
            ended = printable(f"sandbox.host: a jail of tier {tier!r} ended: {report[:2000]}")
            print(ended, file=sys.stderr, flush=True)
        elif tier_jail.served == 0 and self._starts[tier].failed(self._loop.time(), killed=not report):
            cause = nsjail.explain(log) if log.strip() or not tier_jail.reason else ""
            self._failed(tier, ": ".join(filter(None, (tier_jail.reason, cause))))
        self._start_up()
        self._fill()

    def _failed(self, tier: str, reason: str) -> None:
        """Notes that a tier's jail cannot start: without its first tier the host gives up, others are left alone."""
        if not self.ready.is_set():
            self._over.set_exception(nsjail.JailUnavailable(reason))
        elif self._starts[tier].last_reason != reason:
            self._starts[tier].last_reason = reason
            print(printable(f"sandbox.host: tier {tier!r} cannot start: {reason}"), file=sys.stderr, flush=True)

    def _watch(self) -> None:
        """Kills slots that should have reported by now, and frees the indexes of those that are gone."""
        now = self._loop.time()
        for slot in list(self._owners):
            if slot.deadline >= now or self._over.done():
                continue
            if slot.pid:
                slot.kill()  # its end is noticed
            elif slot.home.missed():
                slot.home.give_up(f"the jail did not start within {START_S:g} s; preload less or free the CPU")
            else:
                self._slot_died(slot)
        self._indexes.look()
        self._fill()

    # slots

    def _fork(self, queue: Queue) -> None:
        """Forks a slot or a session for the queue, if possible now; its `ready` is called when it can run a call."""
        if not self._indexes.free and (idle := self._sessions.idle()) is not None:
            self._end_session(idle)
        if not self._indexes.free or (home := self._jail(queue.tier)) is None:
            return  # until `_watch` sees that something is gone, or `_run_jail` that the jail is
        session = isinstance(queue, SessionQueue)
        slot = home.open_slot(self._indexes.free.pop(), session=session, ended=self._slot_ended)
        self._owners[slot] = queue
        if isinstance(queue, SessionQueue):
            queue.slot = slot
        else:
            queue.starting += 1

        def ready() -> None:
            slot.home.served += 1
            self._starts[queue.tier].well()
            if isinstance(queue, TierQueue):
                queue.starting -= 1
                self._return_slot(queue, slot)
                self._start_up()
            self._fill()

        slot.ready = ready

    def _return_slot(self, queue: TierQueue, slot: SlotHandle) -> None:
        """Gives an idle slot back to wait for a call, unless its jail is being replaced."""
        if self._jails.get(queue.tier) is slot.home:
            queue.idle.append(slot)
        else:
            self._discard(slot)

    def _slot_ended(self, slot: SlotHandle) -> None:
        if self._over.done():
            slot.close()  # the node repeats what is open
            return
        self._slot_died(slot)
        self._start_up()
        self._fill()

    def _slot_died(self, slot: SlotHandle) -> None:
        """Handles a slot that has ended or must end: answers the call that it ran."""
        queue, call = self._owners[slot], slot.call
        if isinstance(queue, SessionQueue):
            self._end_session(queue)
            return
        if slot in queue.idle:
            queue.idle.remove(slot)
        elif not slot.pid:
            queue.starting -= 1
            if not slot.home.over.done() and self._starts[queue.tier].slot_failed(self._slots):
                slot.home.give_up("its slots end before they are ready")
        self._discard(slot)
        if call is not None:
            self._answer(call.id, wire.ToolResult(outcome="memory", jailed=True) if slot.out_of_memory else LOST)

    def _discard(self, slot: SlotHandle) -> None:
        """Closes the slot, whatever state it is in, and gives back its index."""
        del self._owners[slot]
        self._running -= slot.call is not None
        slot.close()
        self._indexes.release(slot)
        self._retire_jail_if_done(slot.home)

    def _retire_jail_if_done(self, tier_jail: TierJail) -> None:
        """Replaces a jail that has served `recycle_calls`; stops a replaced one that has no slots."""
        name = tier_jail.tier.name
        if self._jails.get(name) is tier_jail and tier_jail.served >= self._recycle_calls:
            del self._jails[name]
            idle, self._queues[name].idle = self._queues[name].idle, []
            for slot in idle:
                self._discard(slot)
        if self._jails.get(name) is not tier_jail and not tier_jail.slots:
            tier_jail.stop()

    def _fill(self) -> None:
        """Starts what can start, the oldest first; forks slots for what only lacks one."""
        if self._over.done():
            return
        self._busy = {queue for queue in self._busy if queue.waiting}
        queues = set(self._busy)
        while queues and self._running < self._slots:
            queue = min(queues, key=lambda queue: queue.arrived)
            if not self._start(queue) or not queue.waiting:
                queues.remove(queue)

    def _start(self, queue: Queue) -> bool:
        """Starts the queue's oldest call; returns whether that was possible."""
        if isinstance(queue, SessionQueue):
            return self._start_cell(queue)
        if queue.idle and not queue.idle[-1].home.over.done():
            self._start_call(queue)
            return True
        if self._loop.time() < self._starts[queue.tier].paused_until:
            for id in queue.take_all():
                self._answer(id, LOST)
        for _ in range(min(len(queue.waiting), self._slots - self._running) - queue.starting):
            self._fork(queue)
        return False

    def _start_call(self, queue: TierQueue) -> None:
        slot, (_, call) = queue.idle.pop(), queue.waiting.popleft()

        def ended(result: wire.ToolResult) -> None:
            self._return_slot(queue, slot)
            self._answer(call.id, result)

        self._run_on(slot, call, ended)

    def _run_on(self, slot: SlotHandle, call: wire.RunRequest, ended: Callable[[wire.ToolResult], None]) -> None:
        """Runs the call; `ended` gets its result before the next calls are started."""
        self._running += 1

        def report(result: wire.ToolResult) -> None:
            self._running -= 1
            slot.home.served += 1
            ended(result)
            self._retire_jail_if_done(slot.home)
            self._fill()

        slot.start(call, report)

    # sessions

    def _session_queue(self, call: wire.RunRequest, step: wire.SessionStep) -> SessionQueue | None:
        """Returns the queue of a cell's session, new if the cell brings its history; None if the state is not here."""
        queue = self._sessions.get(step.session)
        if step.history is None:
            return queue if queue is not None and not queue.script and queue.number == step.number else None
        if queue is not None:
            self._end_session(queue)
        if call.tier not in self._tiers:
            return None
        return self._sessions.add(SessionQueue(call.tier, step))

    def _start_cell(self, queue: SessionQueue) -> bool:
        slot = queue.slot
        if slot is None:
            if self._loop.time() < self._starts[queue.tier].paused_until:
                self._end_session(queue)
            else:
                self._fork(queue)
            return False
        if not slot.pid or slot.call is not None:
            return False
        step = queue.waiting[0][1].step
        if not queue.script and step is not None and step.number != queue.number:
            self._answer(queue.waiting.popleft()[1].id, LOST_STATE)  # an earlier cell changed the state meanwhile
            return True
        self._sessions.use(queue)
        call, slot.backup = queue.next()
        self._run_on(slot, call, lambda result: self._cell_ended(queue, slot, result))
        return True

    def _cell_ended(self, queue: SessionQueue, slot: SlotHandle, result: wire.ToolResult) -> None:
        answered = queue.ended(result)
        if queue.broken:
            self._end_session(queue)
        elif answered is not None:
            for other in self._sessions.hold(queue, slot.memory_bytes):
                self._end_session(other)
        if answered is not None:
            self._answer(answered, result)

    def _end_session(self, queue: SessionQueue) -> None:
        """Forgets the session; what waits for it, or runs in it, is answered as lost."""
        self._sessions.remove(queue)
        slot, queue.slot = queue.slot, None
        if slot is not None:
            slot.kill()
            self._discard(slot)
        for id in queue.take_all():
            self._answer(id, LOST_STATE)
