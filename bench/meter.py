"""CPU seconds and memory of groups of processes, read from outside.

Invariants
- CPU counts every process below the given roots, those that came and ended meanwhile included.
- A meter leaves no cgroup behind, and the processes where they were.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.processes import TICK, family

RELEASE_S = 2.0  # processes that are being born while others are moved out need a second look


class Meter:
    """CPU seconds of the trees below `roots` since the start of the meter, to the nanosecond with cgroup v1.

    Elsewhere from /proc/PID/stat, in clock ticks: exact enough over some hundred calls. (A cgroup v2 would do as well,
    but moving a host into one would tear it from the cgroups that it made for its own children.)
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
        return sum(_ticks(pid) for pid in self._members()) / TICK

    def memory_bytes(self) -> int:
        """Proportional share of all mapped pages, plus page tables; kernel objects such as namespaces not included."""
        return sum(map(_memory_bytes, self._members()))

    def close(self) -> None:
        if self._group is None:
            return
        members = self._group / "cgroup.procs"
        _move(lambda: list(map(int, members.read_text().split())), self._group.parent)
        with contextlib.suppress(OSError):
            self._group.rmdir()

    def _members(self) -> list[int]:
        return sorted({pid for root in self._roots for pid in family(root)})


def threads_cpu_s(pid: int) -> float:
    """CPU seconds of one process, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def children_of(pid: int) -> set[int]:
    return set(family(pid)) & {child for child in map(int, _numbers("/proc")) if _parent(child) == pid}


def listeners(port: int) -> list[int]:
    """Processes of this machine that hold a listening TCP socket on `port`."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    wanted = {f"socket:[{row[9]}]" for row in lines if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    found = []
    for pid in _numbers("/proc"):
        with contextlib.suppress(OSError):
            if any(os.readlink(fd) in wanted for fd in Path(f"/proc/{pid}/fd").iterdir()):
                found.append(int(pid))
    return found


def local_port(host: str, port: int) -> int | None:
    """`port`, if `host` is this machine."""
    addresses = {info[4][0] for info in socket.getaddrinfo(host, port)}
    return port if addresses & {"127.0.0.1", "::1", "0.0.0.0"} else None


def _numbers(folder: str) -> list[str]:
    return [name for name in os.listdir(folder) if name.isdigit()]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _ticks(pid: int) -> int:
    try:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    except OSError:
        return 0


def _memory_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text() + Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return 1024 * sum(map(int, re.findall(r"^(?:Pss|VmPTE):\s*(\d+) kB", text, re.MULTILINE)))


def _make_cpuacct() -> Path | None:
    """A fresh group below our own in cgroup v1's cpuacct, None where there is none or we may not."""
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
    """Move `members()` into `group` until no new one turns up: a fork may be under way."""
    done: set[int] = set()
    deadline = time.monotonic() + RELEASE_S
    while (new := set(members()) - done) and time.monotonic() < deadline:
        done |= new
        for pid in new:
            with contextlib.suppress(OSError):
                (group / "cgroup.procs").write_text(str(pid))
