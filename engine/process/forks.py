"""Ties the processes that are forked for the node to it, and keeps the node's threads and signals out of them.

Invariants
- A child is killed with the thread that forked it, from its first moment on: kill -9 of the node leaves nothing behind.
- A signal to the child does not reach the node's event loop.
- The child can import a module that another thread of the node was importing at the fork.
- The child inherits no descriptor that another thread has made for a fork of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import _bootstrap
from pathlib import Path

PR_SET_PDEATHSIG = 1
IMPORT_S = 5.0  # how long a fork waits for other threads' imports; one may never end, if a program runs inside it

_libc = ctypes.CDLL(None, use_errno=True)  # looked up before the fork
_here = threading.local()  # forks: the Forks that this thread is in
# A thread holds the lock from before it makes the pipes of its fork until it has forked. If another thread forked
# meanwhile, that child would hold the ends of the pipes too, and hide the end of the first child until its own.
_one_at_a_time = threading.Lock()


class Forks:
    """The processes that one thread forks while it is in `forks_die_with_us`."""

    def __init__(self) -> None:
        self.parent = os.getpid()
        self._thread: int | None = threading.get_native_id()
        self._ended = False
        self._mask: set[int] = set()  # this thread's signal mask
        self._alone = False  # whether this thread holds the lock

    def end(self) -> None:
        """Kills what was forked (SIGKILL); what is forked after this ends at once.

        Another thread calls it when the one that forked does not return; once that has returned, it does nothing. A
        kernel without CONFIG_PROC_CHILDREN (rare) lists no children, so there they only end with the node.
        """
        self._ended = True
        if self._thread is None:
            return
        with contextlib.suppress(FileNotFoundError):
            for pid in Path(f"/proc/self/task/{self._thread}/children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def wait_for_turn(self) -> None:
        _one_at_a_time.acquire()
        self._alone = True

    def give_turn(self) -> None:
        if self._alone:
            self._alone = False
            _one_at_a_time.release()

    def close(self) -> None:
        self.give_turn()
        self._thread = None  # its number may soon be another thread's

    def before_fork(self) -> None:
        _let_imports_end()
        # In the child, signals wait until the node's handlers are gone; in the node, other threads take them meanwhile.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

    def after_fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self.give_turn()

    def begin_child(self) -> None:
        """Prepares the child; it runs there before anything else."""
        if self._ended:
            os._exit(1)
        die_with(self.parent)
        _drop_signals()
        _drop_import_locks()
        _one_at_a_time._at_fork_reinit()  # type: ignore[attr-defined]
        self._alone = False
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self.parent = os.getpid()  # the child is the parent of what it forks
        self._thread = threading.get_native_id()


@contextmanager
def forks_die_with_us(*, alone: bool = False) -> Iterator[Forks]:
    """Inside this context, what this thread forks is killed as soon as the thread or its process ends.

    alone: whether other threads that ask for the same wait until this one has forked once, or leaves.
    """
    _here.forks = forks = Forks()
    if alone:
        forks.wait_for_turn()
    try:
        yield forks
    finally:
        _here.forks = None
        forks.close()


def leave_terminal() -> None:
    """Makes this process lead a session of its own, if it does not yet: handling Ctrl-C is the node's task."""
    if os.getsid(0) != os.getpid():
        os.setsid()


def die_with(parent: int) -> None:
    """Lets the kernel kill this process when the thread that forked it ends. Exits at once if that has happened."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _drop_signals() -> None:
    """Removes the node's handlers. They would write each signal of the child into the pipe that wakes the node's event
    loop, which would take it for its own.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # neither SIG_IGN nor SIG_DFL
            signal.signal(number, signal.SIG_DFL)


def _drop_import_locks() -> None:
    """Removes the import locks of other threads. Nobody could release them, and importing such a module would hang."""
    _bootstrap._module_locks.clear()  # type: ignore[attr-defined]
    _bootstrap._blocking_on.clear()  # type: ignore[attr-defined]


def _half_imported() -> bool:
    """Returns whether any thread is importing a module."""
    specs = [getattr(module, "__dict__", {}).get("__spec__") for module in list(sys.modules.values())]
    return any(getattr(spec, "_initializing", False) for spec in specs)


def _let_imports_end() -> None:
    """Waits for imports of other threads. The child would inherit half a module, and nobody would complete it."""
    deadline, pause = time.monotonic() + IMPORT_S, threading.Event()
    while _half_imported() and time.monotonic() < deadline:
        pause.wait(0.01)  # it polls, because waiting for an import lock has no timeout


def _at_fork(act: Callable[[Forks], None]) -> Callable[[], None]:
    def hook() -> None:
        if forks := getattr(_here, "forks", None):
            act(forks)

    return hook


os.register_at_fork(
    before=_at_fork(Forks.before_fork),
    after_in_parent=_at_fork(Forks.after_fork),
    after_in_child=_at_fork(Forks.begin_child),
)
