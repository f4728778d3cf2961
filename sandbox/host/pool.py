"""The pool of a host: runs calls in the slots of its jails, one jail a tier, and keeps sessions.

Invariants
- Every call submitted is answered once: with the kernel's verdict, or as "lost" when its slot or jail died under it or
  could not start. Those that are open when `run` ends are not answered.
- At most `slots` calls run at once. Calls of a tier start in the order of `submit`, cells of a session too.
- A cell runs only on the state that it expects: a session that is not here at that state is answered "lost".
- A tier's jail starts at the first call that needs it, the first tier's at the start; one that ends is started again by
  the next call. One that fails some times in a row is not tried again for PAUSE_S.
- A jail that has served `recycle_calls` is replaced, so that no zygote's address layout serves for ever; its sessions
  live on in it, and it ends with the last of them.
- Beyond `session_memory_bytes`, or without a free index, the idle session used least recently ends.
- The index of a slot or session (its uid, its control group) is used again when nothing of it is left.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection

from sandbox import wire
from sandbox.host import nsjail
from sandbox.host.queues import Lane, SessionLane, Sessions, Starts
from sandbox.host.slots import START_S, Indexes, Link, TierJail
from sandbox.tiers import Tier

WATCH_S = 1.0
RECYCLE_CALLS = 100_000
LOST = wire.ToolResult(outcome="lost")
LOST_STATE = wire.ToolResult(outcome="lost", session_state="lost")


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
        self._jails: dict[str, TierJail] = {}  # what new slots and sessions come from
        self._all_jails: set[TierJail] = set()  # also those that are being replaced
        self._starts = {tier.name: Starts() for tier in tiers}
        self._lanes = {tier.name: Lane(tier.name) for tier in tiers}
        self._sessions = Sessions(session_memory_bytes)
        self._busy: set[Lane] = set()  # what calls wait in
        self._owners: dict[Link, Lane] = {}  # of every link that is not dropped
        self._indexes = Indexes()
        self._running = self._arrived = 0
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Serve until `leave`. JailUnavailable when the first tier's jail cannot start."""
        async with asyncio.TaskGroup() as self._group:
            self._start_up()
            try:
                while not self._over.done():
                    await asyncio.wait((self._over,), timeout=WATCH_S)
                    self._watch()
            finally:
                self.leave()
                for tier_jail in list(self._all_jails):
                    tier_jail.leave()
        self._over.result()

    def leave(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def submit(self, call: wire.Call) -> None:
        if self._over.done():
            return
        self._arrived += 1
        lane = self._lanes.get(call.tier) if call.step is None else self._session_lane(call, call.step)
        if lane is None:  # also: a tier that the hello did not name
            self._answer(call.id, LOST if call.step is None else LOST_STATE)
            return
        lane.waiting.append((self._arrived, call))
        self._busy.add(lane)
        self._fill()

    def cancel(self, ids: Collection[int]) -> None:
        ids = set(ids)
        for link in list(self._owners):
            if link.call is not None and link.call.id in ids:
                link.cancel()
        for lane in list(self._busy):
            taken = lane.take_out(ids)
            for id in taken:
                self._answer(id, wire.ToolResult(outcome="killed"))
            if taken and isinstance(lane, SessionLane) and lane.script:
                self._end_session(lane)  # half built, and for nobody
        self._fill()

    def end_sessions(self, sessions: Collection[bytes]) -> None:
        for id in sessions:
            if (lane := self._sessions.get(id)) is not None:
                self._end_session(lane)
        self._fill()

    # jails

    def _start_up(self) -> None:
        """The host says hello when slots of the first tier are there: fork them, also again."""
        first = next(iter(self._lanes.values()))
        if self._over.done() or self.ready.is_set() or first.starting:
            return
        if first.idle:
            self.ready.set()
            return
        for _ in range(self._slots):
            self._fork(first)

    def _jail(self, tier: str) -> TierJail | None:
        """The tier's jail, started if there is none; None while one comes to its end."""
        tier_jail = self._jails.get(tier)
        if tier_jail is None:
            tier_jail = self._jails[tier] = self._make_jail(self._tiers[tier])
            self._all_jails.add(tier_jail)
            self._group.create_task(self._keep(tier_jail), name=f"sandbox-jail-{tier}")
        return None if tier_jail.over.done() else tier_jail

    async def _keep(self, tier_jail: TierJail) -> None:
        """Wait for the end of a jail and answer what it takes along."""
        log = await tier_jail.run()
        self._all_jails.discard(tier_jail)
        if self._over.done():
            return
        tier = tier_jail.tier.name
        if self._jails.get(tier) is tier_jail:
            del self._jails[tier]
        for link in list(tier_jail.links):
            self._end_link(link)
        said = f"{tier_jail.reason}\n{log}".strip()
        if tier_jail.served and said:
            print(f"sandbox.host: a jail of tier {tier!r} ended: {said[:2000]}", file=sys.stderr, flush=True)
        elif tier_jail.served == 0 and self._starts[tier].failed(self._loop.time(), killed=not said):
            cause = nsjail.explain(log) if log.strip() or not tier_jail.reason else ""
            self._failed(tier, ": ".join(filter(None, (tier_jail.reason, cause))))
        self._start_up()
        self._fill()

    def _failed(self, tier: str, reason: str) -> None:
        """The tier's jail never serves: a host without its first tier is of no use, else the tier is left alone."""
        if not self.ready.is_set():
            self._over.set_exception(nsjail.JailUnavailable(reason))
        elif self._starts[tier].said != reason:
            self._starts[tier].said = reason
            print(f"sandbox.host: tier {tier!r} cannot start: {reason}", file=sys.stderr, flush=True)

    def _watch(self) -> None:
        """End what should have reported by now; use the indexes of what is gone again."""
        now = self._loop.time()
        for link in list(self._owners):
            if link.deadline >= now or self._over.done():
                continue
            if link.pid:
                link.kill()  # its end is noticed
            elif link.home.missed():
                link.home.give_up(f"the jail did not start within {START_S:g} s; preload less or free the CPU")
            else:
                self._end_link(link)
        self._indexes.look()
        self._fill()

    # slots

    def _fork(self, lane: Lane) -> None:
        """Fork a slot or a session for the lane, if that is possible now. It is of use when it is ready."""
        if not self._indexes.free and (idle := self._sessions.idle()) is not None:
            self._end_session(idle)
        if not self._indexes.free or (home := self._jail(lane.tier)) is None:
            return  # until `_watch` finds that something is gone, or `_keep` that the jail is
        session = isinstance(lane, SessionLane)
        link = home.open_link(self._indexes.free.pop(), session=session, ended=self._link_ended)
        self._owners[link] = lane
        if isinstance(lane, SessionLane):
            lane.link = link
        else:
            lane.starting += 1

        def ready() -> None:
            link.home.served += 1
            self._starts[lane.tier].well()
            if not session:
                lane.starting -= 1
                self._give_back(lane, link)
                self._start_up()
            self._fill()

        link.ready = ready

    def _give_back(self, lane: Lane, link: Link) -> None:
        """The slot is idle: it waits for a call, unless its jail is being replaced."""
        if self._jails.get(lane.tier) is link.home:
            lane.idle.append(link)
        else:
            self._drop(link)

    def _link_ended(self, link: Link) -> None:
        if self._over.done():
            link.close()  # what is open is the node's to repeat
            return
        self._end_link(link)
        self._start_up()
        self._fill()

    def _end_link(self, link: Link) -> None:
        """The link is of no use any more: answer what it held."""
        lane, call = self._owners[link], link.call
        if isinstance(lane, SessionLane):
            self._end_session(lane)
            return
        if link in lane.idle:
            lane.idle.remove(link)
        elif not link.pid:
            lane.starting -= 1
            if not link.home.over.done() and self._starts[lane.tier].slot_failed(self._slots):
                link.home.give_up("its slots end before they are ready")
        self._drop(link)
        if call is not None:
            self._answer(call.id, wire.ToolResult(outcome="memory", jailed=True) if link.out_of_memory else LOST)

    def _drop(self, link: Link) -> None:
        """Have done with a link, in whatever state it is."""
        del self._owners[link]
        self._running -= link.call is not None
        link.close()
        self._indexes.release(link)
        self._let_go(link.home)

    def _let_go(self, tier_jail: TierJail) -> None:
        """Replace a jail that has served its time; end one that is replaced and of no use any more."""
        name = tier_jail.tier.name
        if self._jails.get(name) is tier_jail and tier_jail.served >= self._recycle_calls:
            del self._jails[name]
            idle, self._lanes[name].idle = self._lanes[name].idle, []
            for link in idle:
                self._drop(link)
        if self._jails.get(name) is not tier_jail and not tier_jail.links:
            tier_jail.leave()

    def _fill(self) -> None:
        """Start what can start, the oldest first; fork slots for what only lacks one."""
        if self._over.done():
            return
        self._busy = {lane for lane in self._busy if lane.waiting}
        lanes = set(self._busy)
        while lanes and self._running < self._slots:
            lane = min(lanes, key=lambda lane: lane.arrived)
            if not self._start(lane) or not lane.waiting:
                lanes.remove(lane)

    def _start(self, lane: Lane) -> bool:
        """Start the lane's oldest call; whether that was possible."""
        if isinstance(lane, SessionLane):
            return self._start_cell(lane)
        if lane.idle and not lane.idle[-1].home.over.done():
            self._start_call(lane)
            return True
        if self._loop.time() < self._starts[lane.tier].paused_until:
            for id in lane.take_all():
                self._answer(id, LOST)
        for _ in range(min(len(lane.waiting), self._slots - self._running) - lane.starting):
            self._fork(lane)
        return False

    def _start_call(self, lane: Lane) -> None:
        link, (_, call) = lane.idle.pop(), lane.waiting.popleft()

        def ended(result: wire.ToolResult) -> None:
            self._give_back(lane, link)
            self._answer(call.id, result)

        self._run_on(link, call, ended)

    def _run_on(self, link: Link, call: wire.Call, ended: Callable[[wire.ToolResult], None]) -> None:
        """Run the call; `ended` is given its result before others are looked for that can start now."""
        self._running += 1

        def report(result: wire.ToolResult) -> None:
            self._running -= 1
            link.home.served += 1
            ended(result)
            self._let_go(link.home)
            self._fill()

        link.start(call, report)

    # sessions

    def _session_lane(self, call: wire.Call, step: wire.Step) -> SessionLane | None:
        """The lane of the cell's session: built anew if it brings its history, None if it is not here at that state."""
        lane = self._sessions.get(step.session)
        if step.history is None:
            return lane if lane is not None and not lane.script and lane.number == step.number else None
        if lane is not None:
            self._end_session(lane)
        if call.tier not in self._tiers:
            return None
        return self._sessions.add(SessionLane(call.tier, step))

    def _start_cell(self, lane: SessionLane) -> bool:
        link = lane.link
        if link is None:
            if self._loop.time() < self._starts[lane.tier].paused_until:
                self._end_session(lane)
            else:
                self._fork(lane)
            return False
        if not link.pid or link.call is not None:
            return False
        step = lane.waiting[0][1].step
        if not lane.script and step is not None and step.number != lane.number:
            self._answer(lane.waiting.popleft()[1].id, LOST_STATE)  # a cell before it changed the state meanwhile
            return True
        self._sessions.use(lane)
        call, link.backup = lane.next()
        self._run_on(link, call, lambda result: self._cell_ended(lane, link, result))
        return True

    def _cell_ended(self, lane: SessionLane, link: Link, result: wire.ToolResult) -> None:
        answered = lane.ended(result)
        if lane.broken:
            self._end_session(lane)
        elif answered is not None:
            for other in self._sessions.hold(lane, link.memory_bytes):
                self._end_session(other)
        if answered is not None:
            self._answer(answered, result)

    def _end_session(self, lane: SessionLane) -> None:
        """Forget the session; what waits for it, or runs in it, is answered as lost."""
        self._sessions.remove(lane)
        link, lane.link = lane.link, None
        if link is not None:
            link.kill()
            self._drop(link)
        for id in lane.take_all():
            self._answer(id, LOST_STATE)
