"""A process that is forked for the node dies with the node, from its first moment on: kill -9 leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)  # looked up before the fork
_here = threading.local()  # parent: the pid that forks of this thread belong to


@contextmanager
def forks_die_with_us() -> Iterator[None]:
    """What this thread forks meanwhile is killed as soon as this thread or its process ends."""
    _here.parent = os.getpid()
    try:
        yield
    finally:
        _here.parent = 0


def die_with(parent: int) -> None:
    """SIGKILL for this process when the thread that forked it ends; at once where that has happened before."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _forked() -> None:
    if parent := getattr(_here, "parent", 0):
        _here.parent = os.getpid()  # what this one forks is its own
        die_with(parent)


os.register_at_fork(after_in_child=_forked)
