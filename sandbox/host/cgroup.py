"""Control groups of a sandbox host: memory and processes of each slot, version 1 and 2.

Invariants
- Each slot has a group of its own, set from outside; nothing in the jail can see or reach it.
- What runs in a slot is bounded as a whole: all processes, files on its tmpfs and kernel memory together, without swap.
  A process that needs more dies alone: the kernel kills one process of the group, not all of it.
- Groups are used only if a trial could put a process into one under limits; otherwise one line tells why not.
- When the host is gone, however it ended, the janitor kills what still runs in its groups, only that, and removes them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import signal
from dataclasses import dataclass
from pathlib import Path

REMOVE_S = 10.0
TRY_S = 0.02
ROUNDS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Names of the files of one version."""

    memory_max: str
    memory_current: str
    events: str
    swap: str  # "0" here means none, for the groups below too


V1 = Files(
    memory_max="memory.limit_in_bytes",
    memory_current="memory.usage_in_bytes",
    events="memory.oom_control",
    swap="memory.swappiness",
)
V2 = Files(memory_max="memory.max", memory_current="memory.current", events="memory.events", swap="memory.swap.max")
CONTROLLERS = {"memory", "pids"}
HAND_DOWN = "+memory +pids"


class Cgroup:
    """The group of one slot. folders: the memory and the pids folder, which are the same in version 2."""

    def __init__(self, files: Files, folders: list[Path], pid: int) -> None:
        self._files, self._folders = files, folders
        self._limits: tuple[int, int] | None = None
        for folder in folders:
            folder.mkdir(exist_ok=True)
            try:
                (folder / "cgroup.procs").write_text(str(pid))
            except OSError:  # it has died
                self.remove()
                raise
        self._kills = self._oom_kills()

    def limit(self, memory_bytes: int, processes: int) -> None:
        """Sets the limits, unless they are set already."""
        if self._limits != (memory_bytes, processes):
            (self._folders[0] / self._files.memory_max).write_text(str(memory_bytes))
            (self._folders[-1] / "pids.max").write_text(str(processes))
            self._limits = (memory_bytes, processes)

    @property
    def memory_bytes(self) -> int:
        with contextlib.suppress(OSError):
            return int((self._folders[0] / self._files.memory_current).read_text())
        return 0  # the group is gone

    def oom_struck(self) -> bool:
        """Returns whether the kernel killed for memory in this group since the last call."""
        before, self._kills = self._kills, self._oom_kills()
        return self._kills > before

    def _oom_kills(self) -> int:
        with contextlib.suppress(OSError):  # the group is gone
            # Each call does this, and a Path would take twice as long.
            fd = os.open(f"{self._folders[0]}/{self._files.events}", os.O_RDONLY)
            try:
                fields = os.read(fd, 4096).split()
            finally:
                os.close(fd)
            return int(fields[fields.index(b"oom_kill") + 1]) if b"oom_kill" in fields else 0
        return 0

    def remove(self) -> bool:
        """Removes the group if its processes are gone; returns whether nothing of it remains."""
        for folder in set(self._folders):
            with contextlib.suppress(OSError):
                folder.rmdir()
        return not any(folder.exists() for folder in self._folders)


class Cgroups:
    """The groups of this host, in a folder of its own below each of `parents`."""

    def __init__(self, files: Files, parents: list[Path]) -> None:
        self.version = 1 if files is V1 else 2
        self._files = files
        for parent in parents:
            sweep(parent)
        # Random, since hosts of two containers may have the same process number, and the janitor kills what it finds
        # here.
        name = f"rocstar-{os.getpid()}-{secrets.token_hex(4)}"
        self.folders = [parent / name for parent in parents]
        try:
            for folder in self.folders:
                folder.mkdir()
            if (swap := self.folders[0] / files.swap).exists():  # missing if the kernel has no swap
                swap.write_text("0")
            if files is V2:
                (self.folders[0] / "cgroup.subtree_control").write_text(HAND_DOWN)
            self._try()
        except OSError:
            clean(self.folders)
            raise
        self._keep_clean()

    def add(self, name: str, pid: int) -> Cgroup:
        """Returns a group with this process in it."""
        return Cgroup(self._files, [folder / name for folder in self.folders], pid)

    def close(self) -> None:
        """Lets the janitor clean up now, and waits for it."""
        os.close(self._janitor_waits)
        os.waitpid(self._janitor, 0)

    def _try(self) -> None:
        """Puts a process under limits, since making the folders may be allowed where that is not."""
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(theirs)
                os.read(ours, 1)
            finally:
                os._exit(0)
        try:
            group = self.add("trial", child)
            group.limit(1 << 30, 64)
        finally:
            os.close(theirs)
            os.close(ours)
            os.waitpid(child, 0)
        group.remove()

    def _keep_clean(self) -> None:
        """Forks the janitor, which waits for the end of this process and then removes what remains."""
        ours, self._janitor_waits = os.pipe()
        self._janitor = os.fork()
        if self._janitor:
            os.close(ours)
            return
        try:
            os.setsid()
            os.chdir("/")
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            for fd in (0, 1, 2):
                os.dup2(ours, fd)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            os.read(0, 1)
            clean(self.folders)
        finally:
            os._exit(0)


def sweep(parent: Path) -> None:
    """Removes the empty folders of hosts that are gone together with their janitors."""
    for folder in parent.glob("rocstar-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            for group in [*folder.glob("*/"), folder]:
                with contextlib.suppress(OSError):
                    group.rmdir()


def clean(folders: list[Path], remove_s: float = REMOVE_S) -> None:
    """Kills what runs in these groups and below, and removes them."""
    for _ in range(int(remove_s / TRY_S)):
        for folder in folders:
            for group in [*folder.glob("*/"), folder]:
                with contextlib.suppress(OSError):
                    _kill(group)
                    group.rmdir()
        if not any(folder.exists() for folder in folders):
            return
        select.select([], [], [], TRY_S)


def _kill(group: Path) -> None:
    """Kills the processes of a group, and no other process that has got the number of a dead one."""
    processes = {}
    for pid in _processes(group):
        with contextlib.suppress(OSError):
            processes[pid] = os.pidfd_open(pid)
    still_there = _processes(group)
    for pid, process in processes.items():
        if pid in still_there:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)


def _processes(group: Path) -> list[int]:
    return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]


def open_groups() -> Cgroups | str:
    """Returns this host's groups, or one line: why there are none, and what to do about it."""
    causes = []
    for version, find in ((1, _v1), (2, _v2)):
        try:
            groups = find()
        except OSError as error:
            groups = f"{error.strerror}: {error.filename or 'moving a process into a group'}"
        if isinstance(groups, Cgroups):
            return groups
        causes.append(f"version {version}: {groups}")
    fix = (
        "run as root, or give this user a group with memory and pids (systemd-run --user --scope -p Delegate=yes ...), "
        "in a container mount /sys/fs/cgroup writable"
    )
    return f"no memory and pids control groups ({', '.join(causes)}). Fix: {fix}"


def _v1() -> Cgroups | str:
    memory, pids = own_group("memory"), own_group("pids")
    if memory is None or pids is None:
        return "no memory and pids controllers"
    return Cgroups(V1, list(dict.fromkeys([memory, pids])))


def _v2() -> Cgroups | str:
    """Makes groups beside our own group if that is allowed; else inside it, after moving its processes away."""
    own = own_group("")
    if own is None:
        return "not mounted"
    given = (own / "cgroup.controllers").read_text().split()
    if not CONTROLLERS.issubset(given):
        return f"{own} is given no memory and pids controllers"
    if (own.parent / "cgroup.procs").exists():  # otherwise it is the topmost group that can be seen
        with contextlib.suppress(OSError):
            return Cgroups(V2, [own.parent])
    hand_down = own / "cgroup.subtree_control"
    try:
        hand_down.write_text(HAND_DOWN)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        _make_room(own)
        hand_down.write_text(HAND_DOWN)
    return Cgroups(V2, [own])


def _make_room(group: Path) -> None:
    """Moves the processes of our own group into one below it, since a group with processes hands nothing down.

    Container engines do the same. The new group stays, as the processes do.
    """
    rest = group / "rocstar_rest"  # not rocstar-*, so that it is not ours to remove
    rest.mkdir(exist_ok=True)
    try:
        for _ in range(ROUNDS):  # they may be forking meanwhile
            for pid in _processes(group):
                with contextlib.suppress(ProcessLookupError):
                    (rest / "cgroup.procs").write_text(str(pid))
    except OSError:
        with contextlib.suppress(OSError):
            rest.rmdir()
        raise


def own_group(controller: str, proc: Path = Path("/proc/self")) -> Path | None:
    """Returns the folder of this process's own group for a controller of version 1, or for version 2 ("")."""
    paths = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, target = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        wanted = kind == "cgroup2" if controller == "" else kind == "cgroup" and controller in options.split(",")
        if wanted and controller in paths:
            own = Path(paths[controller])
            return Path(target) / (own.relative_to(root) if own.is_relative_to(root) else ".")
    return None
