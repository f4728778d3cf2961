"""The zygote: PID 1 of a jail. It imports once, rehearses once, then only forks slots and sessions.

Standard library only.

Invariants
- It never sees code, stdin or output of a call.
- When the host is gone (end of file on the control socket) it exits, and the kernel ends everything in the jail.
- When a slot dies, what the slot had started dies too: the init of the slot's call is in the slot's process group.

Control messages: host -> zygote: index and kind of a slot to fork, with its socket. The zygote itself sends nothing;
why it cannot serve is on its stderr, the host's log.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from typing import NoReturn

from sandbox.inside import guest, linux, main_program, native, seccomp_allowlist
from sandbox.inside.notebook import SessionInit
from sandbox.inside.slot import Slot

FORK = struct.Struct("qq")  # index, and whether it is for a session
CANNOT_PRELOAD = "cannot preload: "
POOL_BYTES = 1 << 14  # a pool of Python's allocator holds objects of one size (Objects/obmalloc.c)


class Reaper:
    """Handles SIGCHLD: collects dead children, after ending a slot's process group, so that no pid is reused."""

    def __init__(self) -> None:
        self._again = self._busy = False

    def __call__(self, *_: object) -> None:
        self._again = True
        if self._busy:
            return  # it interrupted itself: two at once would fight for the same child
        self._busy = True
        while self._again:
            self._again = False
            while (dead := _dead_child()) is not None:
                with contextlib.suppress(ProcessLookupError):  # the slot left nothing, or this was no slot
                    os.killpg(dead, signal.SIGKILL)
                os.waitpid(dead, 0)
        self._busy = False


def _dead_child() -> int | None:
    try:
        child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if child is None else child.si_pid


def prepare(preload: list[str], proc: int, library: native.Native | None) -> None:
    """Brings this interpreter to the state in which every call starts."""
    import site

    for setup in ("setquit", "setcopyright", "sethelper"):
        getattr(site, setup)()
    for name in preload:
        importlib.import_module(name)
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    may_refuse = contextlib.suppress(OSError)  # on an odd kernel, about which `freeze` warns
    with may_refuse:
        if library is not None:
            library.forget(proc)
    guest.rehearse(libraries=True)
    with may_refuse:
        if library is not None:
            library.keep(proc)
            library.forget(proc)
    guest.rehearse(libraries=False)
    sys.path.insert(0, guest.HOME)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sandbox"]:
        del sys.modules[name]  # guest code must not find this package
    os.environ.pop("LD_BIND_NOW", None)
    sys.orig_argv[:] = [sys.executable, "-B", "-X", "utf8", "main.py"]
    gc.collect()
    gc.freeze()
    fill_holes()


def fill_holes() -> None:
    """Uses up the free places between this process's objects.

    Calls then put theirs side by side on fresh pages, and a third fewer pages are copied in each call.
    """
    allocate, release = ctypes.pythonapi.PyObject_Malloc, ctypes.pythonapi.PyObject_Free
    allocate.restype, allocate.argtypes, release.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    first = []  # for each size, the first place in a pool of its own
    for size in range(16, 513, 16):
        for _ in range(1 << 16):
            place = allocate(size)
            if ctypes.c_uint.from_address(place & -POOL_BYTES).value <= 4:  # the pool's count of places in use
                first.append(place)
                break
    for place in first:
        release(place)


def freeze(proc: int, library: native.Native | None) -> int:
    """Takes the snapshot, if the native part and the kernel allow it; returns the bytes of our address space."""
    try:
        if library is not None:
            library.snapshot(proc)
    except OSError as error:
        print(f"no memory snapshot, calls cost up to twice as much: {error}", file=sys.stderr, flush=True)
    with open(os.open("self/statm", os.O_RDONLY, dir_fd=proc)) as file:
        pages = int(file.read().split()[0])
    os.close(proc)
    return pages * resource.getpagesize()


def main() -> None:
    control, proc, ids = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    library = native.load()
    policies = [linux.Filter(seccomp_allowlist.actions(session=session)) for session in (False, True)]
    if ids == "none":
        # Not above: what it imports would lie in the memory of every jailed call.
        from sandbox.inside.unjailed_slot import UnjailedSlot

        # Nowhere, since /tmp is this machine's and everybody sees what is there
        main_program.FILENAME = os.devnull + "/main.py"
    try:
        prepare(sys.argv[4:], proc, library)
    except BaseException as error:
        sys.exit(f"{CANNOT_PRELOAD}{type(error).__name__}: {error}")
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    signal.signal(signal.SIGCHLD, Reaper())
    for number in (main_program.LAST_WORDS, signal.SIGXCPU):  # for the calls, which inherit it
        signal.signal(number, main_program.last_words)
    image = freeze(proc, library)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, FORK.size, 1)
        if not message:
            return
        index, session = FORK.unpack(message)
        if os.fork() == 0:
            control.close()
            uid = guest.FIRST_UID + index if ids == "own-id" else None
            identity = guest.Identity(uid, image, policies[session], ids != "none")
            host = socket.socket(fileno=descriptors[0])
            if ids == "none":
                run(UnjailedSlot(host, identity, None), session)
            run(SessionInit(host, identity) if session else Slot(host, identity, library), session)
        os.close(descriptors[0])


def run(slot: Slot | SessionInit, session: bool) -> NoReturn:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if not session:  # the init of a session outlives the process that the zygote forks
            os.setpgid(0, 0)
        slot.serve()
    except BaseException:
        traceback.print_exc()  # on the host's log; the host sees the end of the socket
    finally:
        os._exit(1)  # also for a call that did not come to its code: no success
