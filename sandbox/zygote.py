"""The zygote: PID 1 of the jail. Imports once, rehearses once, then only forks slots. Standard library only.

Invariants
- It never sees code, stdin or output of a call.
- When the host is gone (end of file on the control socket) it exits, and the kernel ends everything in the jail.
- When a slot dies, what the slot had started dies too: the init of the slot's call is in the slot's process group.

Control messages: host -> zygote: the index of a slot to fork, with its socket. The zygote itself sends nothing; why it
cannot serve is on its stderr, the host's log.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import struct
import sys
import traceback
from typing import NoReturn

from . import guest, linux
from .slot import Slot

INDEX = struct.Struct("q")
CANNOT_PRELOAD = "cannot preload: "


def reap(*_: object) -> None:
    """Collect dead children; before a slot's pid can be used again, end its process group."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None:
            return
        with contextlib.suppress(ProcessLookupError):  # the slot left nothing, or this was an orphan and no slot
            os.killpg(found.si_pid, signal.SIGKILL)
        os.waitpid(found.si_pid, 0)


def prepare(preload: list[str]) -> None:
    """Bring this interpreter to the state in which every call shall start."""
    import site

    for setup in ("setquit", "setcopyright", "sethelper"):
        getattr(site, setup)()
    for name in preload:
        importlib.import_module(name)
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]
    guest.rehearse()
    sys.path[0] = guest.HOME
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__]:
        del sys.modules[name]  # guest code shall not find us
    gc.freeze()


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        prepare(sys.argv[3:])
    except BaseException as error:
        sys.exit(f"{CANNOT_PRELOAD}{type(error).__name__}: {error}")
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    signal.signal(signal.SIGCHLD, reap)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, INDEX.size, 1)
        if not message:
            return
        (index,) = INDEX.unpack(message)
        if os.fork() == 0:
            control.close()
            run_slot(descriptors[0], guest.FIRST_UID + index if sys.argv[2] == "full" else None)
        os.close(descriptors[0])


def run_slot(fd: int, uid: int | None) -> NoReturn:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        Slot(socket.socket(fileno=fd), uid).serve()
    except BaseException:
        traceback.print_exc()  # on the host's log; the host sees the end of the socket
    finally:
        os._exit(0)
