"""Reads CPU seconds and memory of groups of processes from outside.

Invariants
- CPU counts every process below the given roots, those included that came and ended meanwhile.
- A meter leaves no cgroup behind, and leaves the processes where they were.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from engine.telemetry.others import family

RELEASE_S = 2.0  # processes that are being born while others are moved out need a second look


class Meter:
    """Counts the CPU seconds of the trees below `roots` since its construction, to the nanosecond with cgroup v1.

    Elsewhere psutil gives them in clock ticks, which is exact enough over some hundred calls. (A cgroup v2 would do as
    well, but moving a host into one would tear it from the cgroups that it made for its own children.)
    """

    def __init__(self, roots: Iterable[int]) -> None:
        self._roots = list(roots)
        self._group = _make_cpuacct()
        if self._group is not None:
            _move(self._members, self._group)

    @property
    def source(self) -> str:
        return "cpuacct" if self._group else "ticks"

    def cpu_s(self) -> float:
        if self._group is not None:
            return int((self._group / "cpuacct.usage").read_text()) / 1e9
        return sum(_cpu_s(process) for process in self._processes())

    def memory_bytes(self) -> int:
        """Returns the proportional share of all mapped pages (PSS), without kernel objects such as namespaces."""
        return sum(map(_memory_bytes, self._processes()))

    def close(self) -> None:
        if self._group is None:
            return
        members = self._group / "cgroup.procs"
        _move(lambda: list(map(int, members.read_text().split())), self._group.parent)
        with contextlib.suppress(OSError):
            self._group.rmdir()

    def _members(self) -> list[int]:
        return [process.pid for process in self._processes()]

    def _processes(self) -> set[psutil.Process]:
        return {process for root in self._roots for process in family(root)}


def threads_cpu_s(pid: int) -> float:
    """Returns the CPU seconds of one process, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def children_of(pid: int) -> set[int]:
    return {child.pid for child in psutil.Process(pid).children()}


def listeners(port: int) -> list[int]:
    """Returns the processes of this machine that hold a listening TCP socket on `port`."""
    sockets = psutil.net_connections("tcp")
    return sorted(
        {each.pid for each in sockets if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid}
    )


def local_port(host: str, port: int) -> int | None:
    """Returns `port` if `host` is this machine."""
    addresses = {info[4][0] for info in socket.getaddrinfo(host, port)}
    return port if addresses & {"127.0.0.1", "::1", "0.0.0.0"} else None


def _cpu_s(process: psutil.Process) -> float:
    """Returns its own CPU and that of its children that have ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


def _memory_bytes(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


def _make_cpuacct() -> Path | None:
    """Makes a group below our own in cgroup v1's cpuacct; None where there is none or we may not."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    root = next((row[1] for row in mounts if row[2] == "cgroup" and "cpuacct" in row[3].split(",")), None)
    own = re.search(r"^\d+:(?:\S+,)?cpuacct(?:,\S+)?:(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    if root is None or own is None:
        return None
    group = Path(root, own[1].lstrip("/"), f"rocstar-bench-{os.getpid()}-{time.monotonic_ns()}")
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text("")
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        return None
    return group


def _move(members: Callable[[], Iterable[int]], group: Path) -> None:
    """Moves `members()` into `group` until no new one turns up: a fork may be under way."""
    done: set[int] = set()
    deadline = time.monotonic() + RELEASE_S
    while (new := set(members()) - done) and time.monotonic() < deadline:
        done |= new
        for pid in new:
            with contextlib.suppress(OSError):
                (group / "cgroup.procs").write_text(str(pid))
