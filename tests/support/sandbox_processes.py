"""Looking at a sandbox's processes from outside."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path


def descendants(root: int) -> dict[int, str]:
    """Pid -> command line (or name, for one without) of every living process below `root`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found: set[int] = set()
    while new := {pid for pid, parent in parents.items() if (parent == root or parent in found) and pid not in found}:
        found |= new
    return {pid: _command(pid) for pid in found}


def running(pid: int) -> bool:
    """Whether the process exists and is no zombie (which a machine whose init does not reap may keep)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    """0 when the process is gone."""
    try:
        return int(_stat(pid)[1])
    except OSError:
        return 0


def _stat(pid: int) -> list[str]:
    """proc_pid_stat(5), from the third field."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def host_pid() -> int:
    """The newest host; its janitor bears the same name. (Numbers of processes start again from below.)"""
    hosts = [pid for pid, command in descendants(os.getpid()).items() if "-m sandbox.host" in command]
    return max((pid for pid in hosts if parent_of(pid) not in hosts), key=lambda pid: int(_stat(pid)[19]))


def is_nsjail(command: str) -> bool:
    """Its path may hold spaces."""
    return command.partition(" --config ")[0].endswith("nsjail") and " --config " in command


def nsjail_pid() -> int:
    return next(pid for pid, command in descendants(host_pid()).items() if is_nsjail(command))


def zygote_pid() -> int:
    nsjail = nsjail_pid()
    return next(pid for pid in descendants(nsjail) if parent_of(pid) == nsjail)


def slot_pids() -> list[int]:
    zygote = zygote_pid()
    return [pid for pid in descendants(zygote) if parent_of(pid) == zygote]


async def until(condition: Callable[[], object], deadline_s: float = 10.0) -> None:
    """Wait for something that another process does and that nothing can be awaited for."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
