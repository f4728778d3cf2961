"""A process that is forked for the node: it dies with the node, and has nothing of the node's threads and signals.

Invariants
- It ends with the thread that forked it, from its first moment on: kill -9 of the node leaves nothing behind.
- A signal to it is its own: the node's event loop does not hear of it.
- It can import whatever another thread of the node was importing when it was forked.
- It holds no descriptor that another thread was making for a fork of its own.
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
IMPORT_S = 5.0  # how long a fork waits for imports of other threads: a program may itself run inside of one, for ever

_libc = ctypes.CDLL(None, use_errno=True)  # looked up before the fork
_here = threading.local()  # forks: the Forks that this thread is in
# From before a thread makes the pipes of its fork until it has forked. A fork of another thread meanwhile would hold
# their ends too, and the end of the first fork, which closes its own, would not be seen before that of the second.
_one_at_a_time = threading.Lock()


class Forks:
    """What one thread forks while it is in `forks_die_with_us`."""

    def __init__(self) -> None:
        self.parent = os.getpid()
        self._thread: int | None = threading.get_native_id()
        self._ended = False
        self._mask: set[int] = set()  # of this thread's signals
        self._alone = False  # holds the lock

    def end(self) -> None:
        """SIGKILL for what was forked; what is forked after this ends at once. For another thread to call, when the
        one that forked does not return. Nothing once it has.

        A kernel without CONFIG_PROC_CHILDREN (rare) lists no children: these end with the node only.
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
        # A signal to the child waits until the node's handlers are gone there; one to the node is another thread's.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

    def after_fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self.give_turn()

    def begin_child(self) -> None:
        """Runs in the child, before anything else."""
        if self._ended:
            os._exit(1)
        die_with(self.parent)
        _drop_signals()
        _drop_import_locks()
        _one_at_a_time._at_fork_reinit()  # type: ignore[attr-defined]
        self._alone = False
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self.parent = os.getpid()  # what this one forks is its own
        self._thread = threading.get_native_id()


@contextmanager
def forks_die_with_us(*, alone: bool = False) -> Iterator[Forks]:
    """What this thread forks meanwhile is killed as soon as this thread or its process ends.

    alone: until the first fork no other thread is inside in this way: it waits. Not for a thread that may not fork.
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
    """This process leads a session of its own: Ctrl-C is the node's to handle. Nothing where it does so already."""
    if os.getsid(0) != os.getpid():
        os.setsid()


def die_with(parent: int) -> None:
    """SIGKILL for this process when the thread that forked it ends; at once where that has happened before."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _drop_signals() -> None:
    """The node's handlers would write each signal of this process into the pipe that wakes the node's event loop, which
    takes it for its own.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # not: ignored, or as the system does it
            signal.signal(number, signal.SIG_DFL)


def _drop_import_locks() -> None:
    """Nobody is left to release those that other threads held: the first import of such a module would never end."""
    _bootstrap._module_locks.clear()  # type: ignore[attr-defined]
    _bootstrap._blocking_on.clear()  # type: ignore[attr-defined]


def _half_imported() -> bool:
    """Whether a module is being imported, by any thread."""
    specs = [getattr(module, "__dict__", {}).get("__spec__") for module in list(sys.modules.values())]
    return any(getattr(spec, "_initializing", False) for spec in specs)


def _let_imports_end() -> None:
    """The child would find half of a module that another thread is importing, and nobody would fill it."""
    deadline, pause = time.monotonic() + IMPORT_S, threading.Event()
    while _half_imported() and time.monotonic() < deadline:
        pause.wait(0.01)  # a poll: the locks of the import system can only be waited for without a limit


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
