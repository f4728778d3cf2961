"""What a sandbox could leave on the machine, looked for from outside."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.support.sandbox_processes import descendants

MARK = "attack_was_here"  # the name of every file that an attack tries to put where it should not


def folders_and_mounts() -> set[str]:
    """Temporary folders of ours, files of attacks, and the mounts that this process can see."""
    places = {tempfile.gettempdir(), "/tmp", "/dev/shm", "/var/tmp", "/run", "/", "/dev", "/dev/mqueue", os.getcwd()}
    found = [path for place in places if os.path.isdir(place) for path in Path(place).iterdir()]
    named = {str(path) for path in found if path.name.startswith(("rocstar", "nsjail", MARK))}
    return named | {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}


def system_v_objects() -> set[str]:
    return {
        line for kind in ("shm", "sem", "msg") for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
    }


def cgroups_of(pids: Iterable[int]) -> set[Path]:
    """Folders of the control groups that these processes are in and this process is not: made for them."""
    return {path for pid in pids for path in _cgroups(pid)} - _cgroups(os.getpid())


def _cgroups(pid: int) -> set[Path]:
    mounts = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ")
        if kind in ("cgroup", "cgroup2"):
            mounts.update({name: left.split()[4] for name in ([""] if kind == "cgroup2" else options.split(","))})
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return set()
    groups = [line.split(":", 2) for line in lines]
    return {
        Path(mounts[name] + path.rstrip("/"))
        for _, names, path in groups
        for name in names.removeprefix("name=").split(",")
        if name in mounts and path != "/"  # where a dead process is shown
    }


def processes_below(host: int) -> tuple[int, int]:
    """How many processes live below the host, and how many are dead and not collected by their parents."""
    alive = descendants(host).keys()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            except OSError:
                continue
            if state == "Z" and (int(parent) in alive or int(parent) == host):
                found.append(int(entry.name))
    return len(alive), len(found)
