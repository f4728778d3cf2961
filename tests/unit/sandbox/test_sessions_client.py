"""Session against a scripted host: what is sent, what is replayed, and what session_state says."""

from __future__ import annotations

import asyncio
import doctest

import pytest

from sandbox import Limits, SandboxUnavailable, Session, Stats, ToolResult, wire
from sandbox.client import session

ID = b"the session's id"
KEPT = ToolResult(outcome="ok", stdout="kept", session_state="kept", cpu_s=0.1)
LOST = ToolResult(outcome="lost", session_state="lost")
HOST_DIED = ToolResult(outcome="lost")
TIMEOUT = ToolResult(outcome="timeout", session_state="lost", cpu_s=4.0)


class ScriptedHost:
    """Answers each cell with the next reply of its script (KEPT when there is none left), and records what came."""

    def __init__(self) -> None:
        self.script: list[ToolResult | Exception | None] = []
        self.seen: list[tuple[str, int, list[str] | None, bool]] = []
        self.steps: list[wire.SessionStep] = []
        self.ended: list[bytes] = []
        self.running = 0
        self.started = asyncio.Event()  # a cell whose reply is None, until `release`
        self.release = asyncio.Event()

    async def send(self, cell: wire.Cell, step: wire.SessionStep) -> ToolResult:
        assert step.session == ID
        self.steps.append(step)
        assert self.running == 0, "one cell at a time"
        self.running += 1
        try:
            history = None if step.history is None else [old.code.decode() for old in step.history]
            self.seen.append((cell.code.decode(), step.number, history, step.backup))
            reply = self.script.pop(0) if self.script else KEPT
            if reply is None:
                self.started.set()
                await self.release.wait()
                reply = KEPT
            if isinstance(reply, Exception):
                raise reply
            return reply
        finally:
            self.running -= 1

    def session(self) -> Session:
        self.stats = Stats()
        return Session(self.send, self.ended.append, id=ID, limits=Limits(), stats=self.stats)


@pytest.fixture
def host() -> ScriptedHost:
    return ScriptedHost()


def test_the_examples_in_the_docstrings() -> None:
    found = doctest.DocTestFinder().find(session.CellLog, globs=vars(session))
    results = [doctest.DocTestRunner().run(test) for test in found]
    assert sum(result.attempted for result in results) == 5
    assert sum(result.failed for result in results) == 0


async def test_cells_run_on_the_live_state_and_nothing_is_replayed(host: ScriptedHost) -> None:
    async with host.session() as s:
        results = [await s.run(code) for code in "abc"]
        assert host.ended == []
    assert host.seen == [("a", 0, [], False), ("b", 1, None, False), ("c", 2, None, False)]
    assert [result.session_state for result in results] == ["kept"] * 3
    assert host.ended == [ID]
    assert host.stats.outcomes == {"ok": 3}
    assert (host.stats.sessions_restored, host.stats.sessions_lost) == (0, 0)


async def test_an_error_is_part_of_the_state(host: ScriptedHost) -> None:
    host.script = [ToolResult(outcome="error", session_state="kept"), LOST]
    async with host.session() as s:
        assert (await s.run("a")).session_state == "kept"
        assert (await s.run("b")).session_state == "restored"
    assert host.seen[1:] == [("b", 1, None, False), ("b", 1, ["a"], False)]


async def test_each_cell_is_replayed_under_its_own_limits_to_its_own_end(host: ScriptedHost) -> None:
    host.script = [KEPT, ToolResult(outcome="error", session_state="kept"), TIMEOUT]
    long, short = Limits(wall_s=60), Limits(wall_s=1)
    async with host.session() as s:
        await s.run("a", limits=long)
        await s.run("b", "in")
        assert (await s.run("c", limits=short)).session_state == "restored"
    [*_, rebuild] = host.steps
    assert rebuild.history == [wire.Cell(b"a", b"", long, True), wire.Cell(b"b", b"in", Limits(), False)]


async def test_an_evicted_session_is_replayed_once_and_lives_on(host: ScriptedHost) -> None:
    host.script = [KEPT, KEPT, LOST, KEPT, KEPT]
    async with host.session() as s:
        results = [await s.run(code) for code in "abcd"]
    assert host.seen[2:] == [("c", 2, None, False), ("c", 2, ["a", "b"], False), ("d", 3, None, True)]
    assert [result.session_state for result in results] == ["kept", "kept", "restored", "kept"]
    assert results[2].stdout == "kept"


async def test_after_a_crash_the_state_is_rebuilt_at_once_without_the_cell(host: ScriptedHost) -> None:
    host.script = [KEPT, TIMEOUT]
    async with host.session() as s:
        await s.run("a")
        result = await s.run("while True: pass")
        assert (result.outcome, result.session_state, result.cpu_s) == ("timeout", "restored", 4.0)
        assert host.seen[2:] == [("", 1, ["a"], False)]
        await s.run("b")
        assert host.seen[3:] == [("b", 2, None, False)], "the host counted the rebuild as a cell"
    assert host.stats.outcomes == {"ok": 2, "timeout": 1}
    assert host.stats.sessions_restored == 1


async def test_a_snapshot_that_the_host_went_back_to_needs_no_replay(host: ScriptedHost) -> None:
    host.script = [KEPT, ToolResult(outcome="killed", session_state="restored")]
    async with host.session() as s:
        await s.run("a")
        assert (await s.run("b")).session_state == "restored"
        await s.run("c")
    assert host.seen[2:] == [("c", 1, None, False)]


async def test_a_crash_of_the_first_cell_leaves_an_empty_state(host: ScriptedHost) -> None:
    host.script = [TIMEOUT]
    async with host.session() as s:
        assert (await s.run("a")).session_state == "restored"
        assert (await s.run("b")).session_state == "kept"
    assert host.seen == [("a", 0, [], False), ("b", 0, [], False)]


async def test_costly_states_are_backed_up(host: ScriptedHost) -> None:
    host.script = [ToolResult(outcome="ok", session_state="kept", cpu_s=session.BACKUP_S)]
    async with host.session() as s:
        for code in "abc":
            await s.run(code)
    assert [backup for *_, backup in host.seen] == [False, False, True]


async def test_when_a_rebuild_dies_twice_the_state_is_lost_and_says_so(host: ScriptedHost) -> None:
    host.script = [KEPT, HOST_DIED, HOST_DIED, HOST_DIED]
    async with host.session() as s:
        await s.run("a")
        result = await s.run("b")
        assert (result.outcome, result.session_state, result.stdout) == ("lost", "lost", "")
        assert host.seen[1:] == [("b", 1, None, False), ("b", 1, ["a"], False), ("b", 1, ["a"], False)]
        assert (await s.run("c")).session_state == "kept"
    assert host.seen[4:] == [("c", 0, [], False)], "from empty, as the result before has said"
    assert host.stats.sessions_lost == 1


async def test_a_crash_whose_rebuild_fails_keeps_its_outcome_and_says_lost(host: ScriptedHost) -> None:
    host.script = [KEPT, TIMEOUT, TIMEOUT]
    async with host.session() as s:
        await s.run("a")
        result = await s.run("b")
        assert (result.outcome, result.session_state) == ("timeout", "lost")
        await s.run("c")
    assert host.seen[2:] == [("", 1, ["a"], False), ("c", 0, [], False)]


async def test_an_interrupted_cell_is_kept_but_never_replayed(host: ScriptedHost) -> None:
    """Nobody knows how far it came. The cell after the loss is not run on some other state."""
    host.script = [KEPT, ToolResult(outcome="timeout", session_state="kept"), KEPT, LOST]
    async with host.session() as s:
        await s.run("a")
        assert (await s.run("while True: x += 1")).session_state == "kept"
        await s.run("b")
        result = await s.run("c")
        assert (result.outcome, result.session_state) == ("lost", "lost")
        await s.run("d")
    assert host.seen[2:] == [("b", 2, None, True), ("c", 3, None, True), ("d", 0, [], False)]


@pytest.mark.parametrize(("cells", "size"), [(session.LOG_CELLS, 1), (4, session.LOG_BYTES // 4)])
def test_a_log_holds_as_much_as_it_may_and_no_more(cells: int, size: int) -> None:
    log, cell = session.CellLog(), wire.Cell(b"#" * size, b"", Limits())
    for _ in range(cells):
        log.add(cell, "ok", cpu_s=0.0)
    assert log.history is not None
    log.add(cell, "ok", cpu_s=0.0)
    assert log.history is None


@pytest.mark.parametrize(("cells", "size"), [(session.LOG_CELLS + 1, 1), (5, session.LOG_BYTES // 4)])
async def test_the_log_is_bounded_and_a_session_beyond_it_cannot_be_replayed(
    host: ScriptedHost, cells: int, size: int
) -> None:
    async with host.session() as s:
        for _ in range(cells):
            await s.run("#" * size)
        host.script = [KEPT, LOST]
        assert (await s.run("a")).session_state == "kept"
        assert (await s.run("b")).session_state == "lost"
        assert (await s.run("c")).session_state == "kept"


async def test_concurrent_cells_run_in_order_one_at_a_time(host: ScriptedHost) -> None:
    host.script = [None]
    async with host.session() as s, asyncio.TaskGroup() as group:
        tasks = [group.create_task(s.run(str(i)), name=f"cell-{i}") for i in range(20)]
        await asyncio.sleep(0)
        host.release.set()
    assert [code for code, *_ in host.seen] == [str(i) for i in range(20)]
    assert all(task.result().session_state == "kept" for task in tasks)


async def test_a_cancelled_cell_is_undone_at_the_next(host: ScriptedHost) -> None:
    """The host is asked first: it may have gone back to a snapshot, or never have started the cell."""
    host.script = [KEPT, None, LOST]
    async with host.session() as s:
        await s.run("a")
        async with asyncio.TaskGroup() as group:
            task = group.create_task(s.run("b"), name="cell")
            await host.started.wait()
            task.cancel()
        assert (await s.run("c")).session_state == "restored"
    assert host.seen[2:] == [("c", 1, None, False), ("c", 1, ["a"], False)]


async def test_an_error_of_the_sandbox_comes_out_and_leaves_the_session_usable(host: ScriptedHost) -> None:
    host.script = [KEPT, SandboxUnavailable("no host"), LOST]
    async with host.session() as s:
        await s.run("a")
        with pytest.raises(SandboxUnavailable, match="no host"):
            await s.run("b")
        assert (await s.run("c")).session_state == "restored"


async def test_a_session_that_is_not_open(host: ScriptedHost) -> None:
    s = host.session()
    with pytest.raises(SandboxUnavailable, match="session"):
        await s.run("a")
    async with s:
        pass
    with pytest.raises(SandboxUnavailable, match="session"):
        await s.run("a")
    assert host.seen == []


async def test_cells_that_wait_when_the_session_ends_do_not_run(host: ScriptedHost) -> None:
    host.script = [None]

    async def refused(code: str) -> None:
        with pytest.raises(SandboxUnavailable, match="session"):
            await s.run(code)

    async with asyncio.TaskGroup() as group:
        async with host.session() as s:
            for code in "ab":
                group.create_task(refused(code), name=f"cell-{code}")
            await asyncio.sleep(0)
        host.release.set()
    assert [code for code, *_ in host.seen] == ["a"]


async def test_misuse(host: ScriptedHost) -> None:
    async with host.session() as s:
        with pytest.raises(ValueError, match=r"stdin .*bytes"):
            await s.run("a", b"1")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"limits .*4"):
            await s.run("a", limits=4)  # type: ignore[arg-type]
    assert host.seen == []
