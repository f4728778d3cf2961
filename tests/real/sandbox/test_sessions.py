"""Sessions on real hosts: what lives, what is rebuilt, and that the result says so."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from sandbox import Limits, Sandbox, SandboxConfig, Tier, ToolResult
from tests.support.sandbox_processes import descendants, host_pid, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
TIERS = (Tier(name="bare", preload=("math", "random", "time")),)
SHORT = Limits(wall_s=0.5)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box() -> AsyncIterator[Sandbox]:
    async with Sandbox(SandboxConfig(slots=4, tiers=TIERS)) as sandbox:
        yield sandbox


def brief(result: ToolResult) -> tuple[str, str, str | None, str | None]:
    return result.outcome, result.stdout, result.display, result.session_state


@pytest.mark.smoke
async def test_state_lives_and_the_last_expression_is_shown(box: Sandbox) -> None:
    async with box.session() as session:
        assert brief(await session.run("import math\nx = 20")) == ("ok", "", None, "kept")
        assert brief(await session.run("def f(y):\n    return math.floor(x + y)")) == ("ok", "", None, "kept")
        assert brief(await session.run("f(1.5)")) == ("ok", "", "21", "kept")
        assert brief(await session.run("print(f(2.5))")) == ("ok", "22\n", None, "kept")
        assert (await session.run("open('note', 'w').write('kept')")).session_state == "kept"
        assert (await session.run("print(open('note').read(), input())", "typed")).stdout == "kept typed\n"


async def test_a_cell_reads_its_own_input_and_none_that_was_left(box: Sandbox) -> None:
    async with box.session() as session:
        assert (await session.run("input()", "one\ntwo\n")).display == "'one'"
        assert "EOFError" in (await session.run("input()")).stderr
        assert (await session.run("input()", "three")).display == "'three'"
        assert (await session.run("import io, sys\nsys.stdin = io.StringIO('own')")).session_state == "kept"
        assert (await session.run("input()")).display == "'own'"


async def test_a_cell_that_closes_its_input_keeps_the_state(box: Sandbox) -> None:
    async with box.session() as session:
        assert (await session.run("numbers = open(0).read().split()", stdin="7 8")).outcome == "ok"
        later = await session.run("numbers")
        assert (later.display, later.session_state) == ("['7', '8']", "kept")
        without = await session.run("input()", stdin="9")
        assert (without.outcome, without.session_state) == ("error", "kept")
        assert "lost sys.stdin" in without.stderr


async def test_a_cell_that_leaves_no_memory_at_all_says_so(box: Sandbox) -> None:
    limits = Limits(wall_s=20, cpu_s=20, memory_bytes=64 << 20)
    for code in ("x = []\nwhile True: x.append(len(x))", "x = None\nwhile True: x = (x,)"):
        async with box.session(limits=limits) as session:
            full = await session.run(code)
            assert (full.outcome, full.exit_code) == ("memory", 1)
            assert full.session_state in ("kept", "restored")


async def test_two_sessions_and_calls_share_nothing(box: Sandbox) -> None:
    async with box.session() as one, box.session() as two:
        await one.run("x = 1\nopen('note', 'w').close()")
        assert "NameError" in (await two.run("x")).stderr
        assert "NameError" in (await box.run("x")).stderr
        assert (await two.run("import os; os.listdir('.')")).display == "[]"


async def test_an_error_keeps_the_state_and_its_own_effects(box: Sandbox) -> None:
    async with box.session() as session:
        await session.run("x = 1")
        failed = await session.run("x = 2\n1 / 0")
        assert (failed.outcome, failed.session_state) == ("error", "kept")
        assert "ZeroDivisionError" in failed.stderr
        assert (await session.run("x = = 3")).session_state == "kept"
        assert brief(await session.run("x")) == ("ok", "", "2", "kept")


async def test_a_later_cell_finds_the_source_of_an_earlier_one(box: Sandbox) -> None:
    async with box.session() as session:
        await session.run("def half(x):\n    return x / 2")
        assert (await session.run("import inspect; print(inspect.getsource(half))")).stdout.startswith("def half(x):\n")
        shown = await session.run("import traceback\ntry: half('')\nexcept TypeError: traceback.print_exc()")
        assert "    return x / 2\n" in shown.stderr


async def test_a_wall_limit_of_any_size_is_waited_for(box: Sandbox) -> None:
    async with box.session(limits=Limits(wall_s=2.0**40)) as session:
        assert brief(await session.run("import time\ntime.sleep(0.2)\n1")) == ("ok", "", "1", "kept")


async def test_a_timeout_interrupts_and_keeps_the_state(box: Sandbox) -> None:
    async with box.session() as session:
        await session.run("x = 1")
        slow = await session.run("x = 2\nimport time\nwhile True: time.sleep(0.01)", limits=SHORT)
        assert (slow.outcome, slow.session_state) == ("timeout", "kept")
        assert brief(await session.run("x")) == ("ok", "", "2", "kept")


COUNT = """
import asyncio
ticks = 0
async def count():
    global ticks
    while True:
        ticks += 1
        await asyncio.sleep(0)
"""


async def test_a_cell_may_await_and_what_it_started_goes_on_when_a_later_one_does(box: Sandbox) -> None:
    async with box.session() as session:
        assert brief(await session.run("import asyncio\nawait asyncio.sleep(0, 'slept')")) == (
            "ok",
            "",
            "'slept'",
            "kept",
        )
        assert (
            await session.run(COUNT + "task = asyncio.create_task(count()) if await asyncio.sleep(0, 1) else 0")
        ).outcome == "ok"
        first = int((await session.run("ticks")).display or 0)
        assert (
            await session.run("async with asyncio.timeout(9):\n    for n in range(50): await asyncio.sleep(0)")
        ).outcome == "ok"
        assert int((await session.run("ticks")).display or 0) >= first + 40
        assert (await session.run("asyncio.run(asyncio.sleep(0, 'own'))")).display == "'own'"
        assert (await session.run("asyncio.get_event_loop_policy().get_event_loop().close()")).session_state == "kept"
        assert (await session.run("await asyncio.sleep(0, 'again')")).display == "'again'"


async def test_an_error_in_a_cell_that_awaits_shows_the_cell_and_not_the_loop(box: Sandbox) -> None:
    async with box.session() as session:
        failed = await session.run("async def f():\n    1 / 0\nawait f()")
        assert [line.strip() for line in failed.stderr.splitlines()] == [
            "Traceback (most recent call last):",
            'File "<cell 1>", line 3, in <module>',
            'File "<cell 1>", line 2, in f',
            "ZeroDivisionError: division by zero",
        ]
        assert "SyntaxError" in (await session.run("def f():\n    await g()")).stderr
        assert (await session.run("import sys\nawait __import__('asyncio').sleep(0)\nsys.exit(3)")).exit_code == 3


async def test_a_cell_that_is_interrupted_while_it_awaits_does_not_go_on_later(box: Sandbox) -> None:
    code = "import asyncio\nx = 1\ntry:\n    await asyncio.sleep(0.7)\n    x = 2\nfinally:\n    print('end')"
    async with box.session() as session:
        slow = await session.run(code, limits=SHORT)
        assert brief(slow) == ("timeout", "end\n", None, "kept")
        assert 'File "<cell 1>", line 4' in slow.stderr
        assert "KeyboardInterrupt" in slow.stderr
        assert (await session.run("await asyncio.sleep(0.5)\nx")).display == "1"


@pytest.mark.parametrize(
    "cell",
    [
        "sys.stdout.close(); sys.stderr.close()",
        "sys.stdout = sys.stderr = io.StringIO(); print('into nowhere')",
        "sys.stdout = sys.stderr = None",
        "del sys.stdout, sys.stderr",
        "sys.stdout = io.TextIOWrapper(sys.stdout.detach()); sys.stderr = io.TextIOWrapper(sys.stderr.detach())",
        "sys.stdout.close(); sys.stdout = open('mine', 'w'); sys.__stderr__.close()",
    ],
)
async def test_what_a_cell_does_to_its_outputs_does_not_silence_later_ones(box: Sandbox, cell: str) -> None:
    async with box.session() as session:
        before = await session.run(f"import io, sys\nprint('before')\n{cell}")
        assert (before.stdout, before.session_state) == ("before\n", "kept")
        for _ in range(2):
            after = await session.run("print('é after')\n1 / 0")
            assert (after.outcome, after.stdout, after.session_state) == ("error", "é after\n", "kept")
            assert "ZeroDivisionError" in after.stderr


async def test_a_coding_declaration_says_nothing_about_text(box: Sandbox) -> None:
    async with box.session() as session:
        await session.run("# coding: latin-1\ndef f(): return 'é'")
        assert (await session.run("f()")).display == "'é'"
        source = await session.run(
            "import inspect, linecache\nprint(linecache.getline('<cell 1>', 1), inspect.getsource(f))"
        )
        assert source.stdout == "# coding: latin-1\n def f(): return 'é'\n"


async def test_a_cell_that_takes_no_interrupt_shows_what_it_printed(box: Sandbox) -> None:
    deaf = "print('out')\nimport signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    catching = "print('out')\nimport time\nwhile True:\n    try:\n        time.sleep(60)\n    except: pass"
    for code in (deaf, catching):
        async with box.session() as session:
            result = await session.run(code, limits=SHORT)
            assert (result.outcome, result.stdout, result.session_state) == ("timeout", "out\n", "restored")


STUBBORN = "x = 2\nimport signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("x = 2\nimport os; os._exit(0)", {"ok", "killed", "error"}),
        ("x = 2\nimport os, signal; os.kill(os.getpid(), signal.SIGSEGV)", {"killed"}),
        (STUBBORN, {"timeout"}),
    ],
)
@pytest.mark.parametrize("costly", [False, True])
async def test_a_death_of_the_interpreter_undoes_its_cell(
    box: Sandbox, code: str, outcome: set[str], costly: bool
) -> None:
    """By replay, or by fork snapshot where a replay would be costly."""
    async with box.session() as session:
        await session.run("x = 1\nruns = []")
        if costly:
            await session.run("import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass")
        dead = await session.run(code, limits=SHORT)
        assert dead.outcome in outcome
        assert dead.session_state == "restored"
        assert brief(await session.run("x")) == ("ok", "", "1", "kept")
        again = await session.run(code, limits=SHORT)
        assert again.session_state == "restored"
        assert brief(await session.run("x")) == ("ok", "", "1", "kept")


async def test_the_first_cell_may_die(box: Sandbox) -> None:
    async with box.session() as session:
        assert (await session.run("import os; os._exit(3)")).session_state == "restored"
        assert brief(await session.run("1")) == ("ok", "", "1", "kept")


async def test_a_killed_host_costs_a_replay_and_nothing_else() -> None:
    """The replay is in queue_s of the one cell that needed it, not in its cpu_s or wall_s."""
    async with Sandbox(SandboxConfig(slots=2, tiers=TIERS)) as own, own.session() as session:
        await session.run("x = 1\nimport time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass")
        os.kill(host_pid(), signal.SIGKILL)
        restored = await session.run("x += 1\nx")
        assert brief(restored) == ("ok", "", "2", "restored")
        assert restored.queue_s > 0.4
        assert restored.cpu_s < 0.4
        kept = await session.run("x")
        assert brief(kept) == ("ok", "", "2", "kept")
        assert kept.cpu_s < 0.4
        assert (own.stats.sessions_restored, own.stats.sessions_lost) == (1, 0)


async def test_a_host_killed_under_a_cell_runs_the_cell_again() -> None:
    async with Sandbox(SandboxConfig(slots=2, tiers=TIERS)) as own, own.session() as session:
        await session.run("x = 1\nimport time")
        idle = descendants(host_pid())
        async with asyncio.TaskGroup() as group:
            cell = group.create_task(session.run("time.sleep(0.5)\nx += 1\nx"), name="cell")
            await asyncio.sleep(0.2)
            os.kill(host_pid(), signal.SIGKILL)
        assert brief(cell.result()) == ("ok", "", "2", "restored")
        await until(lambda: not idle.keys() & descendants(host_pid()).keys())


async def test_idle_sessions_are_evicted_and_come_back() -> None:
    """Fifty sessions of 4 MiB each in 40 MB, written as people do."""
    config = SandboxConfig(slots=2, tiers=TIERS, session_memory_bytes=4e7)
    async with Sandbox(config) as own:
        sessions = [own.session() for _ in range(50)]
        for i, session in enumerate(sessions):
            await session.__aenter__()
            assert (await session.run(f"x = {i}\ndata = bytes([1]) * (4 << 20)")).session_state == "kept"
        results = [await session.run("x") for session in sessions]
        assert [result.display for result in results] == [str(i) for i in range(50)]
        assert {result.session_state for result in results} <= {"kept", "restored"}
        assert own.stats.sessions_restored >= 20
        assert own.stats.sessions_lost == 0
        for session in sessions:
            await session.__aexit__()


async def test_a_session_that_cannot_be_replayed_is_lost_and_says_so() -> None:
    """It never answers from fresh state: the cell after the loss does not run."""
    async with Sandbox(SandboxConfig(slots=2, tiers=TIERS)) as own, own.session() as session:
        await session.run("x = 1")
        interrupted = await session.run("while True: x += 1", limits=SHORT)
        assert (interrupted.outcome, interrupted.session_state) == ("timeout", "kept")
        os.kill(host_pid(), signal.SIGKILL)
        lost = await session.run("print('ran')")
        assert brief(lost) == ("lost", "", None, "lost")
        assert "NameError" in (await session.run("x")).stderr
        assert (await session.run("x = 5")).session_state == "kept"
        assert own.stats.sessions_lost == 1


async def test_an_interrupted_session_survives_crashes_by_snapshot(box: Sandbox) -> None:
    async with box.session() as session:
        await session.run("x = 1")
        await session.run("x = 2\nwhile True: pass", limits=SHORT)
        assert (await session.run("import os; os._exit(1)")).session_state == "restored"
        assert brief(await session.run("x")) == ("ok", "", "2", "kept")


async def test_concurrent_cells_run_in_order(box: Sandbox) -> None:
    async with box.session() as session:
        await session.run("order = []")
        async with asyncio.TaskGroup() as group:
            for i in range(20):
                group.create_task(session.run(f"order.append({i})"), name=f"cell-{i}")
        assert (await session.run("order == list(range(20))")).display == "True"


async def test_a_cancelled_cell_ends_and_is_undone(box: Sandbox) -> None:
    async with box.session() as session:
        await session.run("x = 1\nimport time")
        async with asyncio.TaskGroup() as group:
            cell = group.create_task(session.run("x = 2\ntime.sleep(60)", limits=Limits(wall_s=60)), name="cell")
            await asyncio.sleep(0.2)
            cell.cancel()
        after = await session.run("x")
        assert (after.display, after.session_state) in [("1", "restored"), ("1", "kept")]


async def test_the_same_seed_gives_the_same_numbers_also_after_a_rebuild(box: Sandbox) -> None:
    draw, seen = "import random\nrandom.random()", list[str | None]()
    for seed in (7, 7, 8):
        async with box.session(seed=seed) as session:
            seen.append((await session.run(draw)).display)
    assert seen[0] == seen[1] != seen[2]
    async with box.session() as one, box.session() as two:
        numbers = [(await session.run("import random\nx = random.random()\nx")).display for session in (one, two)]
        assert len(set(numbers)) == 2
        assert (await one.run("import os; os._exit(0)")).session_state == "restored"
        assert (await one.run("x")).display == numbers[0]


async def test_a_session_leaves_nothing_behind() -> None:
    async with Sandbox(SandboxConfig(slots=2, tiers=TIERS)) as own:
        await own.run("pass")
        idle = len(descendants(host_pid()))
        async with own.session() as session:
            await session.run("x = 1")
        await until(lambda: len(descendants(host_pid())) <= idle)
