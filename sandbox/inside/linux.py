"""The few system calls that Python has no function for. Standard library only: this file also runs inside the jail.

Invariants
- A call that the kernel refuses raises OSError with its errno; no failure is silent.
- `spawn_init` copies no memory: the init of a call's PID namespace shares its slot's address space and only sleeps.
"""

from __future__ import annotations

import _imp
import ctypes
import fcntl
import mmap
import os
import signal
import struct

CLONE_VM, CLONE_PARENT, CLONE_NEWNS, CLONE_NEWUTS = 0x100, 0x8000, 0x20000, 0x4000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOATIME, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 1024, 4096, 16384, 1 << 18
MNT_DETACH, WALL = 2, 0x40000000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 22, 38, 47
NR_CLOSE_RANGE, NR_MOUNT_SETATTR = 436, 442  # the same numbers on every architecture
AT_FDCWD, AT_RECURSIVE = -100, 0x8000

_libc = ctypes.CDLL(None, use_errno=True)
_fork = ctypes.PyDLL(None, use_errno=True).fork
_syscall = ctypes.PyDLL(None, use_errno=True).syscall
_INIT_STACK = ctypes.create_string_buffer(16384)
_INIT_TOP = ctypes.c_void_p((ctypes.addressof(_INIT_STACK) + 16384) & ~15)
# Looked up once, since a lookup in each call would cost page faults
_FUNCTIONS = (_libc.capset, _libc.prctl, _libc.syscall)
_PAUSE = ctypes.cast(_libc.pause, ctypes.c_void_p)
_CAP_HEADER = struct.pack("Ii", 0x20080522, 0)
_CAP_NONE = bytes(24)


def _checked(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    _checked("unshare", _libc.unshare(flags))


def setns(fd: int, kind: int) -> None:
    _checked("setns", _libc.setns(fd, kind))


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _checked(f"mount {target}", _libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]))


def unmount(target: str) -> None:
    """Detaches `target` now; the kernel frees it when its last user is gone."""
    _checked(f"umount {target}", _libc.umount2(target.encode(), MNT_DETACH))


def bind_read_only(source: str, target: str, flags: int = 0) -> None:
    """Binds `source` and all that is mounted below it, read-only and with these flags of a mount."""
    mount(source, target, None, MS_BIND | MS_REC)
    more = struct.pack("4Q", MS_RDONLY | MS_NOSUID | flags, 0, 0, 0)  # set, cleared, propagation, user namespace
    result = _libc.syscall(NR_MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE, more, ctypes.c_size_t(len(more)))
    _checked(f"mount_setattr {target} (from Linux 5.12)", result)


def address_of(buffer: mmap.mmap) -> int:
    """Returns the address of a writable mapping, which the caller keeps open."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def set_append(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)


def prctl(option: int, argument: int = 0, pointer: ctypes.Array[ctypes.c_char] | None = None) -> None:
    _checked(f"prctl {option}", _libc.prctl(option, ctypes.c_ulong(argument), pointer, 0, 0))


def drop_capabilities() -> None:
    """Empties the calling process's ambient, effective, permitted and inheritable capabilities."""
    prctl(PR_CAP_AMBIENT, 4)
    _checked("capset", _libc.capset(_CAP_HEADER, _CAP_NONE))


def close_from(first: int) -> None:
    """Closes every descriptor from `first` up, in one system call."""
    _checked("close_range", _libc.syscall(NR_CLOSE_RANGE, first, ctypes.c_uint(0xFFFFFFFF), 0))


def spawn_init() -> int:
    """Starts PID 1 of the namespace just unshared; it only sleeps.

    It ignores SIGCHLD, so that the kernel reaps orphans, and blocks all signals: where guest code has its id, it could
    run a handler of ours. So guest code never is PID 1 (which ignores its own signals), and a SIGKILL of this process
    ends the whole namespace.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return _checked("clone", _libc.clone(_PAUSE, _INIT_TOP, CLONE_VM | signal.SIGCHLD, None))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def fork_sibling() -> int:
    """Forks a child of the caller's parent. In it Python's own hooks have run, as after `os.fork`."""
    number = 56 if os.uname().machine == "x86_64" else 220
    # os.fork does this first: the hooks in the child release the lock, which fails for a free lock from Python 3.13 on.
    _imp.acquire_lock()
    pid: int = _syscall(number, ctypes.c_ulong(CLONE_PARENT | signal.SIGCHLD), None, None, None, None)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        _imp.release_lock()
    return _checked("clone", pid)


def fork() -> int:
    """Forks without Python's at-fork hooks, for a process with one thread: threading's alone touches 120 pages.

    What a child needs of the hooks is the caller's task: new seeds for random number generators.
    """
    return _checked("fork", _fork())


class Filter:
    """A seccomp filter for this machine's own system calls; those of another architecture kill the process.

    actions: has (first number, errno or 0 to allow) for each segment of the number line, ascending from 0. In place of
    an errno, -n means EPERM if argument n of the call (from 0) is SIGCONT.
    """

    def __init__(self, actions: list[tuple[int, int]]) -> None:
        load, equal, above, give, kill = 0x20, 0x15, 0x35, 0x06, 0x80000000
        architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[os.uname().machine]
        code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]

        def search(first: int, last: int) -> list[tuple[int, int, int, int]]:
            """Returns a binary search: few steps a call, and few for the kernel when it installs the filter."""
            if first == last:
                error = actions[first][1]
                if error < 0:
                    signal_sent = (load, 0, 0, 16 - 8 * error)  # the lower half of the argument
                    return [signal_sent, (equal, 0, 1, signal.SIGCONT), (give, 0, 0, 0x50001), (give, 0, 0, 0x7FFF0000)]
                return [(give, 0, 0, 0x50000 | error if error else 0x7FFF0000)]
            middle = (first + last + 1) // 2
            low, high = search(first, middle - 1), search(middle, last)
            return [(above, len(low), 0, actions[middle][0]), *low, *high]

        code += search(0, len(actions) - 1)
        self._body = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
        self._program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(self._body)))

    @property
    def address(self) -> int:
        """The address of the kernel's `struct sock_fprog`."""
        return ctypes.addressof(self._program)

    def install(self) -> None:
        prctl(PR_SET_SECCOMP, 2, self._program)
