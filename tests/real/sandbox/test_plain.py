"""isolation="none": said at each start, without sessions, and all else as with a jail."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path

import pytest

from sandbox import Limits, Sandbox, SandboxConfig, Tier, wire
from sandbox.config import NO_JAIL
from tests.support.sandbox_hosts import host_process
from tests.support.sandbox_processes import descendants, host_pid, until

pytestmark = pytest.mark.alone

CONFIG = SandboxConfig(slots=2, isolation="none", tiers=(Tier(name="bare", preload=("math", "random")),))


def found(path: str) -> tuple[int, int] | None:
    """What tells the file that is there from any other."""
    return (os.stat(path).st_ino, os.stat(path).st_mtime_ns) if os.path.exists(path) else None


def folders() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("rocstar-call-*")}


async def test_it_says_so_at_each_start_and_has_a_level_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        async with Sandbox(CONFIG) as box:
            assert (box.stats.level, (await box.run("print(1)")).jailed) == ("none", False)
    assert capfd.readouterr().err == 2 * f"{NO_JAIL}\n"


async def test_a_host_of_its_own_says_so_too() -> None:
    async with (
        host_process("tcp://127.0.0.1:9", "isolation=none", "silence_s=60") as host,
        asyncio.timeout(10),
    ):
        assert host.stderr is not None
        assert (await host.stderr.readline()).decode() == f"{NO_JAIL}\n"


async def test_calls_do_what_they_do_in_a_jail() -> None:
    before = folders()
    async with Sandbox(CONFIG) as box:
        result = await box.run("print(input())", "typed")
        assert (result.outcome, result.stdout, result.exit_code) == ("ok", "typed\n", 0)
        assert (await box.run("1 / 0")).outcome == "error"
        assert (await box.run("open('note', 'w').write('x')")).outcome == "ok"
        assert (await box.run("import os; print('note' in os.listdir('.'))")).stdout == "False\n"
        assert (await box.run("20 + 1", display=True)).display == "21"
        draws = [
            (await box.run("import random; print(random.random())", seed=seed)).stdout for seed in (5, 5, None, None)
        ]
        assert draws[0] == draws[1]
        assert len(set(draws)) == 3
        slow = await box.run("import time\nprint(5)\nwhile True: time.sleep(1)", limits=Limits(wall_s=0.3))
        assert (slow.outcome, slow.stdout) == ("timeout", "5\n")
        assert (await box.run("print('x' * 100)", limits=Limits(output_bytes=10))).truncated
    assert folders() == before


async def test_a_wall_limit_of_any_size_is_waited_for() -> None:
    async with Sandbox(CONFIG) as box:
        result = await box.run("import time\ntime.sleep(0.2)", limits=Limits(wall_s=2.0**40))
        assert (result.outcome, result.stderr) == ("ok", "")


async def test_each_call_runs_its_own_program_from_its_own_folder() -> None:
    """/tmp is the machine's: a main.py there is not this call's."""
    before = found("/tmp/main.py")
    async with Sandbox(CONFIG) as box:
        assert "ZeroDivisionError" in (await box.run("1 / 0")).stderr
        wrong = await box.run("x = = 1")
        assert (wrong.outcome, wrong.exit_code) == ("error", 1)
        assert 'main.py", line 1\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n' in wrong.stderr
        code = "import os, sys\nopen('mine.py', 'w').write('x = 5')\nimport mine\n"
        place = "print(mine.x, __file__ == os.path.join(os.getcwd(), 'main.py'), sys.path[0] == os.getcwd())"
        assert (await box.run(code + place)).stdout == "5 True True\n"
        assert "ModuleNotFoundError" in (await box.run("import mine")).stderr
    assert found("/tmp/main.py") == before


async def test_a_cancelled_call_ends_with_all_that_it_started() -> None:
    before = folders()
    async with Sandbox(CONFIG) as box, asyncio.TaskGroup() as group:
        idle = len(descendants(host_pid()))
        code = "import os, time\nos.fork()\ntime.sleep(60)"
        call = group.create_task(box.run(code, limits=Limits(wall_s=60)), name="call")
        await until(lambda: len(descendants(host_pid())) >= idle + 2)
        call.cancel()
        await until(lambda: len(descendants(host_pid())) == idle)
        assert (await box.run("print(1)")).stdout == "1\n"
        assert folders() == before


async def test_leaving_while_calls_run_leaves_nothing() -> None:
    before = folders()
    async with Sandbox(CONFIG) as box, asyncio.TaskGroup() as group:
        idle = len(descendants(host_pid()))
        call = group.create_task(box.run("import time\ntime.sleep(60)", limits=Limits(wall_s=60)), name="call")
        await until(lambda: len(descendants(host_pid())) > idle)
        below = descendants(os.getpid())
        call.cancel()
    await until(lambda: not below.keys() & descendants(os.getpid()).keys())
    await until(lambda: folders() == before)


async def test_a_slot_that_dies_is_replaced() -> None:
    async with Sandbox(CONFIG) as box:
        for n in range(3):
            [zygote] = [pid for pid in descendants(host_pid()) if f"{pid}" in children(host_pid())]
            os.kill(int(children(zygote)[0]), signal.SIGKILL)
            assert (await box.run(f"print({n})")).stdout == f"{n}\n"


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def test_there_are_no_sessions() -> None:
    async with Sandbox(CONFIG) as box:
        with pytest.raises(ValueError, match="isolation must be 'nsjail' for sessions"):
            box.session()
        step = wire.SessionStep(b"s" * 16, 0, [], False)
        forged = await box._submit(wire.RunRequest(next(box._ids), b"1", b"", Limits(), "bare", step=step))
        assert (forged.outcome, forged.session_state) == ("lost", "lost")
