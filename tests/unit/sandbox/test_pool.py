"""The pool's bookkeeping with jails made by hand: whatever ends, in whatever order, each call is answered once and
nothing drifts. Then the same things with a real jail, looked at from outside.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox import Limits, Tier, ToolResult, wire
from sandbox.host import nsjail
from sandbox.host.pool import Pool
from sandbox.host.queues import PAUSE_S, SessionQueue
from sandbox.host.slots import START_S
from tests.support.examples import examples

TIERS = (Tier(name="first", preload=()), Tier(name="second", preload=()))
SLOTS = 2
LIMITS, OLD = Limits(), Limits(wall_s=7)  # OLD: of what is replayed
KEPT = ToolResult(outcome="ok", session_state="kept")
ENDS = {
    "kept": KEPT,
    "error": ToolResult(outcome="error", session_state="kept"),
    "interrupted": ToolResult(outcome="timeout", session_state="kept"),
    "restored": ToolResult(outcome="killed", session_state="restored"),
    "lost": ToolResult(outcome="killed", session_state="lost"),
}


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time can be moved on."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


class FakeSlot:
    """A slot or a session as the test wants it. Of a session: `kept`, the cells that made its state."""

    def __init__(self, home: FakeJail, index: int, session: bool, ended: Callable[[FakeSlot], None]) -> None:
        self.home, self.index, self.session, self.ended = home, index, session, ended
        self.call: wire.RunRequest | None = None
        self.ready: Callable[[], None] | None = None
        self.pid, self.deadline, self.memory_bytes = 0, home.loop.time() + START_S, 1
        self.backup = self.out_of_memory = self.closed = self.killed = self.cancelled = False
        self.vanishes = True
        self.kept = 0

    def become_ready(self) -> None:
        self.pid, self.deadline = 1, math.inf
        assert self.ready is not None
        self.ready()

    def start(self, call: wire.RunRequest, report: Callable[[ToolResult], None]) -> None:
        assert self.call is None
        assert self.pid
        assert not self.closed
        if self.session:
            assert call.code == b"%d" % self.kept, "a cell ran on another state than its own"
            assert call.step is not None
            assert call.limits == (OLD if self.kept < call.step.number else LIMITS)
        self.call, self._report = call, report

    def report(self, result: ToolResult) -> None:
        self.kept += result.session_state == "kept"
        self.call = None
        self._report(result)

    def cancel(self) -> None:
        self.cancelled = True

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        self.home.slots.remove(self)

    def gone(self) -> bool:
        assert self.closed
        return self.vanishes


class FakeJail:
    def __init__(self, tier: Tier, made: list[FakeJail]) -> None:
        made.append(self)
        self.tier, self.slots, self.served, self.reason = tier, set[FakeSlot](), 0, ""
        self.loop = asyncio.get_running_loop()
        self.over = self.loop.create_future()
        self.stuck, self.log = False, "its log"

    async def run(self) -> str:
        await self.over
        return self.log

    def stop(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def give_up(self, reason: str) -> None:
        self.reason = reason
        self.stop()

    def missed(self) -> bool:
        return self.stuck or self.served == 0

    def open_slot(self, index: int, *, session: bool, ended: Callable[[FakeSlot], None]) -> FakeSlot:
        assert not self.over.done(), "forked in a jail that has ended"
        slot = FakeSlot(self, index, session, ended)
        self.slots.add(slot)
        return slot


class Bench:
    """A pool on fake jails: what was asked, what was answered."""

    def __init__(self, **options: Any) -> None:
        self.jails: list[FakeJail] = []
        self.answers: dict[int, list[ToolResult]] = {}
        self.asked = 0
        options = {"recycle_calls": 1000, "session_memory_bytes": 100, **options}
        self.pool = Pool(
            make_jail=lambda tier: FakeJail(tier, self.jails),  # type: ignore[arg-type, return-value]
            level="full", tiers=TIERS, slots=SLOTS,
            answer=lambda id, result: self.answers.setdefault(id, []).append(result), **options,
        )  # fmt: skip
        self.indexes = len(self.pool._indexes.free)

    def ask(self, tier: str = "first", step: wire.SessionStep | None = None) -> int:
        self.asked += 1
        code = b"" if step is None else b"%d" % step.number
        self.pool.submit(wire.RunRequest(self.asked, code, b"", LIMITS, tier, step=step))
        return self.asked

    def cell(self, session: int, number: int, *, anew: bool = False, tier: str = "first") -> int:
        history = [wire.Cell(b"%d" % i, b"", OLD) for i in range(number)] if anew else None
        return self.ask(tier, wire.SessionStep(b"%d" % session, number, history, False))

    @property
    def slots(self) -> list[FakeSlot]:
        return sorted(self.pool._owners, key=lambda slot: slot.index)  # type: ignore[arg-type, return-value]

    def some(self, wanted: Callable[[FakeSlot], object], n: int = 0) -> FakeSlot | None:
        found = [slot for slot in self.slots if wanted(slot)]
        return found[n % len(found)] if found else None

    def one(self, wanted: Callable[[FakeSlot], object]) -> FakeSlot:
        slot = self.some(wanted)
        assert slot is not None
        return slot

    def answer(self, number: int) -> tuple[str, str | None]:
        [result] = self.answers[number]
        return result.outcome, result.session_state

    def check(self) -> None:
        pool, slots = self.pool, self.slots
        if pool._over.done():
            return
        assert pool._running == sum(slot.call is not None for slot in slots) <= SLOTS
        used = [slot.index for slot in (*slots, *pool._indexes._leaving)]
        assert sorted(used + pool._indexes.free) == list(range(self.indexes))
        for queue in pool._queues.values():
            assert queue.starting == sum(pool._owners[slot] is queue and not slot.pid for slot in slots)  # type: ignore[index]
            assert not any(slot.call or slot.closed for slot in queue.idle)
        queues = [queue for queue in pool._owners.values() if isinstance(queue, SessionQueue)]
        assert all(pool._sessions.get(queue.id) is queue for queue in queues)
        assert pool._sessions.held_bytes == sum(queue.memory_bytes for queue in queues)
        assert all(len(answers) == 1 for answers in self.answers.values())

    async def settle(self) -> None:
        """All goes well from here on, until everything is answered."""
        for _ in range(50 + 4 * self.asked):
            for slot in self.slots:
                if not slot.closed and not slot.pid:
                    slot.become_ready()
                elif not slot.closed and slot.call is not None:
                    slot.report(KEPT)
                self.check()
            await asyncio.sleep(0)
            if len(self.answers) == self.asked and not any(slot.call for slot in self.slots):
                return
        raise AssertionError(f"{self.asked - len(self.answers)} calls were never answered")


@asynccontextmanager
async def bench(**options: Any) -> AsyncIterator[Bench]:
    bench = Bench(**options)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(bench.pool.run(), name="pool")
        await asyncio.sleep(0)
        for slot in bench.slots:
            slot.become_ready()
        assert bench.pool.ready.is_set()
        yield bench
        bench.check()
        bench.pool.stop()
        async with asyncio.timeout(5):
            await running


N = st.integers(0, 9)
STEPS = st.one_of(
    st.tuples(st.just("call"), st.sampled_from(["first", "second", "nonesuch"])),
    st.tuples(st.just("cell"), st.integers(0, 2), st.integers(0, 2), st.booleans(), st.sampled_from([0, 1])),
    st.tuples(st.just("cancel"), N),
    st.tuples(st.just("end"), st.integers(0, 2)),
    st.tuples(st.just("ready"), N),
    st.tuples(st.just("report"), N, st.sampled_from(["kept", "kept", *ENDS])),
    st.tuples(st.just("die"), N, st.booleans()),
    st.tuples(st.just("jail dies"), N),
    st.tuples(st.just("watch"), st.sampled_from([0, START_S + 1])),
)  # fmt: skip


async def play(bench: Bench, step: tuple[Any, ...]) -> None:
    match step:
        case "call", tier:
            bench.ask(tier)
        case "cell", session, number, anew, tier:
            bench.cell(session, number, anew=anew, tier=TIERS[tier].name)
        case "cancel", n:
            bench.pool.cancel([bench.asked - n, bench.asked - n - 1])
        case "end", session:
            bench.pool.end_sessions([b"%d" % session, b"0"])
        case "ready", n if slot := bench.some(lambda slot: not slot.pid, n):
            slot.become_ready()
        case "report", n, how if slot := bench.some(lambda slot: slot.call, n):
            slot.report(ENDS[how])
        case "die", n, lingers if slot := bench.some(lambda slot: True, n):
            slot.vanishes = not lingers
            slot.ended(slot)
            slot.vanishes = True
        case "jail dies", n:
            bench.jails[n % len(bench.jails)].stop()
            await asyncio.sleep(0)
        case "watch", later_s:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, Clock)
            loop.ahead_s += later_s
            bench.pool._watch()
    await asyncio.sleep(0)


@given(st.lists(STEPS, max_size=60), st.sampled_from([3, 1000]), st.sampled_from([2, 100]))
@examples(400)
def test_each_call_is_answered_once_and_nothing_drifts(
    steps: list[tuple[Any, ...]], recycle_calls: int, memory: int
) -> None:
    async def run() -> None:
        async with bench(recycle_calls=recycle_calls, session_memory_bytes=memory) as pool:
            for step in steps:
                await play(pool, step)
                pool.check()
            await pool.settle()

    with asyncio.Runner(loop_factory=Clock) as runner:
        runner.run(run())


async def test_a_session_ended_under_its_cell_answers_it_once() -> None:
    async with bench() as b:
        cell, queued = b.cell(0, 0, anew=True), b.cell(0, 0)
        slot = b.one(lambda slot: slot.session)
        slot.become_ready()
        b.pool.end_sessions([b"0"])
        assert (b.answer(cell), b.answer(queued)) == (("lost", "lost"), ("lost", "lost"))
        assert (slot.killed, slot.closed, b.pool._running) == (True, True, 0)


async def test_a_cancelled_cell_that_runs_is_interrupted_and_answered_with_its_end() -> None:
    async with bench() as b:
        cell = b.cell(0, 0, anew=True)
        slot = b.one(lambda slot: slot.session)
        slot.become_ready()
        b.pool.cancel([cell])
        assert slot.cancelled
        assert cell not in b.answers
        slot.report(ToolResult(outcome="killed", session_state="kept"))
        assert b.answer(cell) == ("killed", "kept")
        assert b.answer(after := b.cell(0, 0)) == ("lost", "lost"), "its effects are in the state"
        assert after not in (slot.call,)


async def test_a_cancel_while_history_is_replayed_ends_the_half_built_session() -> None:
    async with bench() as b:
        cell = b.cell(0, 2, anew=True)
        slot = b.one(lambda slot: slot.session)
        slot.become_ready()
        slot.report(KEPT)
        b.pool.cancel([cell])
        assert b.answer(cell) == ("killed", None)
        assert slot.killed
        assert b.answer(b.cell(0, 2)) == ("lost", "lost")
        assert b.answer(b.cell(0, 1)) == ("lost", "lost")


async def test_a_stop_of_a_cell_whose_session_is_still_starting() -> None:
    async with bench() as b:
        cell = b.cell(0, 0, anew=True)
        b.pool.cancel([cell])
        assert b.answer(cell) == ("killed", None)
        after = b.cell(0, 0)
        await b.settle()
        assert b.answer(after) == ("ok", "kept")


@pytest.mark.parametrize("how", ["error", "interrupted", "restored", "lost"])
async def test_history_that_does_not_end_as_before_is_no_state(how: str) -> None:
    async with bench() as b:
        cell = b.cell(0, 2, anew=True)
        slot = b.one(lambda slot: slot.session)
        slot.become_ready()
        slot.report(KEPT)
        slot.report(ENDS[how])
        assert b.answer(cell) == ("lost", "lost")


@pytest.mark.parametrize(("how", "answer"), [("error", ("ok", "kept")), ("kept", ("lost", "lost"))])
async def test_a_cell_that_failed_fails_again_or_the_state_is_another(how: str, answer: tuple[str, str]) -> None:
    async with bench() as b:
        failed = wire.Cell(b"0", b"", OLD, ok=False)
        cell = b.ask(step=wire.SessionStep(b"0", 1, [failed], False))
        slot = b.one(lambda slot: slot.session)
        slot.become_ready()
        slot.report(ENDS[how])
        if answer[0] == "ok":
            slot.report(KEPT)
        assert b.answer(cell) == answer


async def test_a_session_that_never_becomes_ready_costs_only_itself() -> None:
    async with bench() as b:
        call, cell = b.ask(), b.cell(0, 0, anew=True)
        slot = b.one(lambda slot: slot.session)
        slot.deadline = 0
        b.pool._watch()
        assert b.answer(cell) == ("lost", "lost")
        assert not b.jails[0].over.done()
        await b.settle()
        assert b.answer(call)[0] == "ok"


async def test_a_jail_in_which_nothing_becomes_ready_any_more_is_replaced() -> None:
    async with bench() as b:
        b.jails[0].stuck = True
        cell = b.cell(0, 0, anew=True)
        b.one(lambda slot: slot.session).deadline = 0
        b.pool._watch()
        assert b.jails[0].over.done()
        call = b.ask()
        for _ in range(3):
            await asyncio.sleep(0)
        assert b.answer(cell) == ("lost", "lost")
        await b.settle()
        assert b.answer(call)[0] == "ok"
        assert len(b.jails) == 2


async def early_deaths(b: Bench, until: Callable[[], object]) -> None:
    """Every slot ends before it is ready."""
    for _ in range(20 * SLOTS):
        for slot in b.slots:
            if not slot.pid and not slot.closed:
                slot.ended(slot)
                b.check()
        await asyncio.sleep(0)
        if until():
            return
    raise AssertionError("it goes on for ever")


async def test_slots_that_end_before_they_are_ready_end_their_jail_and_then_the_tier(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with bench() as b:
        call = b.ask("second")
        await early_deaths(b, lambda: call in b.answers)
        assert b.answer(call) == ("lost", None)
        assert len(b.jails) == 3, "tried twice"
        assert "tier 'second' cannot start: its slots end before they are ready" in capsys.readouterr().err
        assert not b.jails[0].over.done()
        b.pool._starts["second"].paused_until = 0.0
        again = b.ask("second")
        await b.settle()
        assert b.answer(again)[0] == "ok"


async def test_a_jail_that_served_is_replaced_when_its_slots_end_early_and_says_what_it_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with bench() as b:
        for slot in b.slots:
            slot.ended(slot)
        call = b.ask()
        await early_deaths(b, lambda: b.jails[0].over.done())
        await b.settle()
        assert (b.answer(call)[0], len(b.jails)) == ("ok", 2)
        said = "a jail of tier 'first' ended: its slots end before they are ready\nits log"
        assert said in capsys.readouterr().err


async def test_a_tier_that_cannot_start_says_why_once_and_is_left_alone_for_a_while(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with bench() as b:

        async def fail() -> None:
            for _ in range(9):
                for made in b.jails[1:]:
                    made.stop()
                await asyncio.sleep(0)

        calls, cell = [b.ask("second") for _ in range(5)], b.cell(0, 0, anew=True, tier="second")
        await fail()
        assert {b.answer(call) for call in (*calls, cell)} == {("lost", None), ("lost", "lost")}
        assert len(b.jails) == 3, "tried twice"
        assert b.answer(b.ask("second")) == ("lost", None)
        assert b.answer(b.cell(1, 0, anew=True, tier="second")) == ("lost", "lost")
        assert len(b.jails) == 3, "left alone"
        b.pool._starts["second"].paused_until = 0.0
        again = b.ask("second")
        await fail()
        assert (b.answer(again), len(b.jails)) == (("lost", None), 5)
        assert capsys.readouterr().err.count("tier 'second' cannot start: ") == 1
        b.pool._starts["second"].paused_until -= PAUSE_S
        well = b.ask("second")
        await b.settle()
        assert b.answer(well)[0] == "ok"


async def test_a_jail_killed_while_it_starts_is_started_again() -> None:
    pool = Bench()
    async with asyncio.TaskGroup() as group:
        group.create_task(pool.pool.run(), name="pool")
        await asyncio.sleep(0)
        pool.jails[0].stop()
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(pool.jails) == 2
        first, second = pool.slots
        first.become_ready()
        second.ended(second)  # nothing else is starting, so one slot is enough to begin with
        assert pool.pool.ready.is_set()
        pool.pool.stop()


async def test_a_jail_that_is_killed_again_and_again_while_it_starts_is_no_broken_one() -> None:
    async with bench() as b:
        call = b.ask("second")
        for n in range(1, 4):
            b.jails[n].log = ""
            b.jails[n].stop()
            for _ in range(3):
                await asyncio.sleep(0)
        assert call not in b.answers
        await b.settle()
        assert (b.answer(call)[0], len(b.jails)) == ("ok", 5)


async def test_a_first_tier_that_cannot_start_ends_the_pool() -> None:
    pool = Bench()

    async def run() -> None:
        with pytest.raises(nsjail.JailUnavailable, match="nsjail failed: its log"):
            await pool.pool.run()

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(run(), name="pool")
        for _ in range(9):
            await asyncio.sleep(0)
            for made in pool.jails:
                made.stop()


async def test_a_jail_that_has_served_its_time_ends_with_its_last_session() -> None:
    async with bench(recycle_calls=4) as b:
        cell = b.cell(0, 0, anew=True)
        slot = b.one(lambda slot: slot.session)
        slot.become_ready()
        slot.report(KEPT)
        assert b.answer(cell) == ("ok", "kept")
        assert b.slots == [slot], "its slots are gone"
        after, more = b.ask(), b.cell(0, 1)
        assert len(b.jails) == 2
        await b.settle()
        assert (b.answer(after)[0], b.answer(more)) == ("ok", ("ok", "kept"))
        assert not b.jails[0].over.done()
        slot.ended(slot)
        assert b.jails[0].over.done()
        assert not b.jails[1].over.done()


async def test_without_a_free_index_the_oldest_idle_session_makes_room() -> None:
    async with bench() as b:
        cells = [b.cell(session, 0, anew=True) for session in range(2)]
        await b.settle()
        b.pool._indexes.free.clear()
        b.indexes = 0
        new = b.cell(2, 0, anew=True)
        b.one(lambda slot: slot.session and not slot.pid).become_ready()
        b.one(lambda slot: slot.call).report(KEPT)
        assert [b.answer(cell) for cell in (*cells, new)] == [("ok", "kept")] * 3
        assert b.answer(b.cell(0, 1)) == ("lost", "lost")
        kept = b.cell(1, 1)
        b.one(lambda slot: slot.call).report(KEPT)
        assert b.answer(kept) == ("ok", "kept")
        b.pool.stop()
