"""Protections that guest code cannot see the lack of, looked at from outside the jail."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox import Limits, Sandbox, SandboxConfig, Tier
from sandbox.inside import native
from sandbox.inside.zygote import freeze
from tests.support.paths import ROOT
from tests.support.sandbox_processes import descendants, host_pid, slot_pids, zygote_pid

pytestmark = pytest.mark.asyncio(loop_scope="module")
ALL_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box() -> AsyncIterator[Sandbox]:
    tiers = (Tier(name="bare", preload=("math",)),)
    async with Sandbox(SandboxConfig(slots=3, tiers=tiers)) as sandbox:
        yield sandbox


@pytest.mark.parametrize("kind", ["mnt", "net", "ipc", "uts"])
async def test_each_slot_and_session_has_namespaces_of_its_own(box: Sandbox, kind: str) -> None:
    """No socket, queue or mount of a call can be met by another; nobody can open one to tell, so ask the kernel."""
    async with box.session() as one, box.session() as two:
        before = set(descendants(host_pid()))
        await one.run("1")
        await two.run("1")
        new = set(descendants(host_pid())) - before
        slots = {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in slot_pids() if pid not in new}
        sessions = {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in new}
        zygote = os.readlink(f"/proc/{zygote_pid()}/ns/{kind}")
        assert (len(slots), len(sessions)) == (3, 2)
        assert len({zygote, os.readlink(f"/proc/self/ns/{kind}")} | slots | sessions) == 7


async def test_memory_that_an_earlier_call_ran_out_of_is_not_this_ones_verdict() -> None:
    """In the same slot: a child dies for memory while its call is fine; then a call kills itself."""
    hoard = """
import os
if os.fork() == 0:
    for n in range(3):
        if os.fork() == 0: break
    hoard = bytearray(b'x') * (60 << 20)
    os.wait()
print(os.wait()[1] & 127)
"""
    tiers = (Tier(name="bare", preload=("math",)),)
    async with Sandbox(SandboxConfig(slots=1, tiers=tiers)) as own:
        if own.stats.level != "full":
            pytest.skip("without control groups nobody is killed for memory")
        for _ in range(3):
            limits = Limits(wall_s=20, memory_bytes=96 << 20, disk_bytes=1 << 20)
            assert (await own.run(hoard, limits=limits)).outcome in ("ok", "memory")
            assert (await own.run("import os; os.kill(os.getpid(), 9)")).outcome == "killed"


BIND = """
import os, sys
from sandbox.inside import linux
source, target = sys.argv[1:]
linux.unshare(linux.CLONE_NEWNS)
linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
linux.mount("tmpfs", f"{source}/below", "tmpfs", linux.MS_NODEV)
linux.bind_read_only(source, target)
for place in (target, f"{target}/below"):
    try: open(f"{place}/new", "w"); print("wrote", place)
    except OSError as error: print(error.errno)
print(os.statvfs(f"{target}/below").f_flag & linux.MS_NODEV)
open(f"{source}/below/new", "w")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
async def test_what_is_mounted_below_a_folder_of_the_jail_is_read_only_too(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("source", "target")]
    for place in places:
        place.mkdir()
    (places[0] / "below").mkdir()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BIND, *map(str, places), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert (printed.split(), process.returncode) == ([b"30", b"30", b"4"], 0)  # EROFS; its own flags stay


class Refusing:
    """A native part on a kernel that gives it nothing."""

    def snapshot(self, proc: int) -> int:
        raise OSError(38, "snapshot: Function not implemented")


async def test_without_a_snapshot_it_goes_on_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    assert freeze(os.open("/proc", os.O_RDONLY), Refusing()) > 1 << 20  # type: ignore[arg-type]
    assert capfd.readouterr().err.startswith("no memory snapshot, calls cost up to twice as much: [Errno 38] snapshot")


@pytest.mark.skipif(not native.LIBRARY.exists(), reason="only the native part takes a snapshot")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may open what a process has mapped")
async def test_the_snapshot_cannot_be_written(box: Sandbox) -> None:
    """It is the memory that all calls start with: sealed, and no process holds a descriptor of it."""
    await box.run("1")
    process = Path(f"/proc/{zygote_pid()}")
    lines = [line.split() for line in (process / "maps").read_text().splitlines() if "memfd:snapshot" in line]
    assert lines
    assert {line[1][3] for line in lines} == {"p"}
    fd = os.open(process / "map_files" / lines[0][0], os.O_RDONLY)
    try:
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == ALL_SEALS
    finally:
        os.close(fd)
    for pid in [zygote_pid(), *descendants(zygote_pid())]:
        held = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
        assert not [name for name in held if "snapshot" in name]


@pytest.mark.skipif(not native.LIBRARY.exists(), reason="only the native part takes a snapshot")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look at what a process has mapped")
async def test_a_call_starts_with_the_text_that_it_uses(box: Sandbox) -> None:
    """Mapped from its file, each 64 KiB of it would cost each call a page fault. It is as read-only as it was."""
    await box.run("1")
    process = Path(f"/proc/{zygote_pid()}")
    text_kib, executable = 0, False
    for line in (process / "smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            executable = "x" in words[1]
            assert words[1] not in ("rwxp", "-wxp")
        elif executable and words[0] == "Anonymous:":
            text_kib += int(words[1])
    assert text_kib > 1024  # of the interpreter, which has 2 MiB and more
