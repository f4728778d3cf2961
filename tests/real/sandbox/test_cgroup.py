"""Control groups on the real kernel, of the version that it has, and the janitor that outlives a host.

Both versions have been run: version 2 on a kernel without version 1 (Debian's user-mode-linux 6.1).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.host import cgroup
from sandbox.host.cgroup import Cgroup, Cgroups, open_groups
from tests.support.paths import ROOT
from tests.support.sandbox_leftovers import cgroups_of
from tests.support.sandbox_level import needs_cgroups
from tests.support.sandbox_processes import descendants, parent_of, running, until

MEMORY = 96 << 20
ANSWER_S = 30.0
HOST = """
import sys
from sandbox.host.cgroup import open_groups
groups = open_groups()
groups.add("slot", int(sys.argv[1]))
print(*groups.folders, flush=True)
sys.stdin.read()
"""
NODE = """
import asyncio
from sandbox import Sandbox, SandboxConfig
async def main():
    async with Sandbox(SandboxConfig(slots=2)) as box:
        await box.run("1")
        print(flush=True)
        await box.run("import time; time.sleep(60)")
asyncio.run(main())
"""


@pytest.fixture
def groups() -> Iterator[Cgroups]:
    found = open_groups()
    if isinstance(found, str):
        pytest.skip(found)
    yield found
    found.close()
    assert not any(folder.exists() for folder in found.folders)


class Member:
    """A Python of its own that runs `code` in a group when told to."""

    def __init__(self, code: str) -> None:
        boot = f"input()\n{code}"
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", boot]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.communicate()

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self) -> str:
        """Let it run up to its next input(); the line that it printed, "" when it ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


def test_a_hog_dies_alone_of_its_groups_limit(groups: Cgroups) -> None:
    with Member("print('in')\ninput()") as bystander, Member("x = bytearray(1 << 30)\nprint('had it')") as hog:
        group = groups.add("slot", bystander.pid)
        group.limit(MEMORY, 8)
        Cgroup(group._files, group._folders, hog.pid)
        assert not group.oom_struck()
        assert hog.ask() == ""
        assert hog.process.wait(ANSWER_S) == -signal.SIGKILL
        assert group.oom_struck()
        assert not group.oom_struck()
        assert bystander.ask() == "in"


@pytest.mark.parametrize(
    "take",
    [
        "x = bytearray(b'x') * (32 << 20)",
        "import os; fd = os.memfd_create('x'); os.write(fd, bytes(32 << 20))",
        "import os\nx = [os.pipe() for _ in range(400)]\nfor _, end in x: os.write(end, bytes(65536))",  # of the kernel
    ],
    ids=["heap", "memory file", "pipes"],
)
def test_all_memory_counts(groups: Cgroups, take: str) -> None:
    with Member(f"{take}\nprint('took')\ninput()") as member:
        group = groups.add("slot", member.pid)
        before = group.memory_bytes
        assert member.ask() == "took"
        assert group.memory_bytes - before > 20 << 20


def test_limits_can_be_changed_and_bound_the_processes(groups: Cgroups) -> None:
    fork = """
import os, time
n = 0
try:
    while n < 50:
        if os.fork() == 0: time.sleep(60)
        n += 1
except OSError: pass
print(n)
input()
"""
    with Member(fork) as member:
        group = groups.add("slot", member.pid)
        group.limit(MEMORY, 3)
        group.limit(2 * MEMORY, 6)
        assert member.ask() == "5"
        assert len(cgroup._processes(group._folders[-1])) == 6


def test_nothing_is_swapped(groups: Cgroups) -> None:
    name = groups._files.swap
    if not (groups.folders[0] / name).exists():
        pytest.skip("this kernel knows no swap")
    with Member("") as member:
        groups.add("slot", member.pid)
        tops = {folder: (folder / name).read_text().strip() for folder in groups.folders[:1]}
        if groups.version == 1:  # what a group's new ones start with; in version 2 the limit holds for all below
            tops |= {groups.folders[0] / "slot": (groups.folders[0] / "slot" / name).read_text().strip()}
        assert set(tops.values()) == {"0"}


def test_the_janitor_keeps_nothing_of_its_host(groups: Cgroups) -> None:
    janitor = groups._janitor
    process = Path(f"/proc/{janitor}")
    asyncio.run(until(lambda: sorted(fd.name for fd in (process / "fd").iterdir()) == ["0", "1", "2"]))
    parent, _, session, terminal = map(int, (process / "stat").read_text().rsplit(")", 1)[1].split()[1:5])
    assert (parent, session, terminal) == (os.getpid(), janitor, 0)
    assert os.readlink(process / "cwd") == "/"
    assert {os.readlink(fd)[:5] for fd in (process / "fd").iterdir()} == {"pipe:"}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(janitor, number)
    assert running(janitor)


def test_when_the_host_is_killed_its_processes_and_groups_go_and_no_others() -> None:
    if isinstance(found := open_groups(), str):
        pytest.skip(found)
    found.close()
    sleep = "import time; time.sleep(60)"
    with Member(sleep) as inside, Member(sleep) as beside:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", HOST, str(inside.pid)]
        with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as host:
            assert host.stdout is not None
            folders = [Path(folder) for folder in host.stdout.readline().split()]
            assert all((folder / "slot").exists() for folder in folders)
            janitor = next(pid for pid in descendants(host.pid))
            host.kill()
        asyncio.run(until(lambda: not any(folder.exists() for folder in folders)))
        assert inside.process.wait(ANSWER_S) == -signal.SIGKILL
        asyncio.run(until(lambda: not running(janitor)))
        assert beside.process.poll() is None


@needs_cgroups
def test_node_and_host_killed_together_leave_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", NODE], cwd=ROOT, stdout=subprocess.PIPE, text=True) as node:
        try:
            assert node.stdout is not None
            assert node.stdout.readline() == "\n"
            below = descendants(node.pid)
            host = next(
                pid for pid, command in below.items() if "sandbox.host" in command and parent_of(pid) == node.pid
            )
            groups = {path for path in cgroups_of(below) if "rocstar-" in str(path)}
            assert groups
            os.kill(host, signal.SIGSTOP)  # so that it cannot tidy up
        finally:
            node.kill()
        os.kill(host, signal.SIGKILL)
    asyncio.run(until(lambda: not any(running(pid) for pid in below)))
    asyncio.run(until(lambda: not any(group.exists() for group in groups)))


def test_what_is_left_below_a_group_goes_with_it(groups: Cgroups) -> None:
    with Member("import time; time.sleep(60)") as member, Member("print('here')\ninput()") as outside:
        groups.add("slot", member.pid)
        for folder in groups.folders:
            cgroup._kill(folder)
        assert member.process.poll() is None  # it is in a group below
        for folder in groups.folders:
            cgroup._kill(folder / "slot")
        assert member.process.wait(ANSWER_S) == -signal.SIGKILL
        assert outside.ask() == "here"


ROOT_LINE = "22 1 0:21 / /proc rw - proc proc rw\n"


@pytest.mark.parametrize(
    ("controller", "own", "mounts", "folder"),
    [
        ("memory", "4:memory:/a/b\n0::/\n", "40 30 0:30 / /cg/memory rw - cgroup cgroup rw,memory\n", "/cg/memory/a/b"),
        ("pids", "8:cpu,pids:/\n", "40 30 0:30 / /cg/x rw,nosuid - cgroup cgroup rw,cpu,pids\n", "/cg/x"),
        # a container that sees its own part of the tree, with and without a namespace that says so
        ("memory", "4:memory:/docker/1\n", "40 30 0:30 /docker/1 /cg ro - cgroup cgroup rw,memory\n", "/cg"),
        ("memory", "4:memory:/docker/1/x\n", "40 30 0:30 /docker/1 /cg ro - cgroup cgroup rw,memory\n", "/cg/x"),
        ("", "0::/\n", "40 30 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n", "/sys/fs/cgroup"),
        ("", "1:name=systemd:/s\n0::/u/a\n", "40 30 0:30 / /cg rw shared:9 - cgroup2 none rw,nsdelegate\n", "/cg/u/a"),
        ("", "0::/../../b\n", "40 30 0:30 /../../b /cg rw - cgroup2 none rw\n", "/cg"),
        ("memory", "0::/\n", "40 30 0:30 / /cg rw - cgroup2 none rw\n", None),
        ("", "4:memory:/a\n", "40 30 0:30 / /cg rw - cgroup cgroup rw,memory\n", None),
    ],
)
def test_finding_the_own_group(tmp_path: Path, controller: str, own: str, mounts: str, folder: str | None) -> None:
    (tmp_path / "cgroup").write_text(own)
    (tmp_path / "mountinfo").write_text(ROOT_LINE + mounts)
    found = cgroup.own_group(controller, tmp_path)
    assert (found and str(found)) == folder
