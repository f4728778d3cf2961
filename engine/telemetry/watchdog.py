"""Prevents silent hangs: reports what every task waits for, on demand (SIGUSR1) and when a run makes no progress.

Invariants
- A run whose `progress` does not change for `silence_s` ends with `NoProgress`, which carries the report.
- A run that failed or was interrupted ends, whatever its threads do.
- Ctrl-C, SIGTERM and SIGHUP end a run in the same way: what it measured is written. A second one ends the process at
  once, even if the event loop is blocked or holds the interpreter. So does the first one, after STANDS_S, if the loop
  is blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from engine.pipeline.pipeline import StageStats

STANDS_S = 10.0  # longest time that a loop may take for its next tick once it is told to end
TWICE_S = 0.5  # a second signal that comes sooner is the same one, sent by a shell and its wrapper, for example


class NoProgress(RuntimeError):
    """A run made no progress for too long. The message lists queues and tasks."""


def report(stats: Callable[[], list[StageStats]]) -> str:
    """Returns queue and blocked seconds of each stage, then the lines where tasks wait, with number and a name."""
    lines = [
        f"  stage {row.name}: {row.queue} queued, {row.items_in} in, {row.items_out} out, busy {row.busy_s:.1f} s, "
        f"blocked on input {row.blocked_in_s:.1f} s, on output {row.blocked_out_s:.1f} s"
        for row in stats()
    ]
    waiting: Counter[str] = Counter()
    names: dict[str, str] = {}
    for task in asyncio.all_tasks():
        where = _waiting_at(task.get_coro())
        waiting[where] += 1
        names.setdefault(where, task.get_name())
    lines += [f"  {count} x {where} ({names[where]})" for where, count in waiting.most_common()]
    return "\n".join(lines)


async def watch(progress: Callable[[], Any], stats: Callable[[], list[StageStats]], silence_s: float = 900.0) -> None:
    """Watches until it is cancelled. Raises NoProgress once progress() has returned the same value for silence_s.

    silence_s must exceed every deadline of a single wait, such as a step of the learner: its own error says more.
    """
    before, unchanged = progress(), 0
    while True:
        await asyncio.sleep(silence_s / 10)
        unchanged = unchanged + 1 if progress() == before else 0
        before = progress()
        # Looks count, not the clock: while this process is stopped (Ctrl-Z, fg) nothing can progress.
        if unchanged > 10:
            raise NoProgress(f"the run has made no progress for {silence_s:g} s:\n{report(stats)}")


@contextlib.contextmanager
def shows_on_signal(stats: Callable[[], list[StageStats]]) -> Iterator[None]:
    """Inside, SIGUSR1 prints the stack of the loop, then the report with the stages of a run. Only the main thread gets
    signals: in any other thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _show_on_signal(stats)
    try:
        yield
    finally:
        _show_on_signal(list)


def _show_on_signal(stats: Callable[[], list[StageStats]]) -> None:
    """Makes SIGUSR1 print stack and report. A handler in C prints the stack, so it works while the loop is blocked."""
    faulthandler.unregister(signal.SIGUSR1)
    report_now = partial(_print_report, stats)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, report_now)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False, chain=True)


def _print_report(stats: Callable[[], list[StageStats]]) -> None:
    print(report(stats), file=sys.stderr, flush=True)


@contextlib.contextmanager
def end_on_signals(
    task: asyncio.Task[Any], stands_s: float = STANDS_S, *, terminate: Callable[[], None] | None = None
) -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and the end of the terminal (SIGHUP) cancel the task, which then writes what it has. A
    run under nohup, which ignores SIGHUP, goes on. SIGUSR1 prints where tasks wait. Must be called in the main thread.

    stands_s: how long the loop may take for its next tick after such a signal. If it takes longer, the stack is printed
    and SIGALRM ends the process. terminate: is called on the loop by the first SIGTERM, in place of the cancellation.
    """
    ending = _Ending(task, asyncio.get_running_loop(), stands_s, terminate)
    faulthandler.register(signal.SIGALRM, file=2, all_threads=False, chain=True)
    _show_on_signal(list)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            ending.take(number)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.unregister(signal.SIGALRM)
        faulthandler.unregister(signal.SIGUSR1)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)


class _Ending:
    """Handles the signals that end a run.

    Python runs a handler between two instructions of the main thread, so it does not run while a library computes. For
    that case each handler is installed for one signal only: the next one meets the kernel's default, which ends the
    process.
    """

    def __init__(
        self,
        task: asyncio.Task[Any],
        loop: asyncio.AbstractEventLoop,
        stands_s: float,
        terminate: Callable[[], None] | None,
    ) -> None:
        self._task, self._loop, self._stands_s, self._terminate = task, loop, stands_s, terminate
        self._first_at: float | None = None
        self._terminated_at = -math.inf

    def take(self, number: int) -> None:
        signal.signal(number, self._handle)
        _handle_once(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.take(number)
        now = time.monotonic()
        if number == signal.SIGTERM and self._terminate is not None:
            terminate, self._terminate, self._terminated_at = self._terminate, None, now
            self._loop.call_soon_threadsafe(terminate)
        elif number == signal.SIGTERM and now - self._terminated_at < TWICE_S:
            return
        elif self._first_at is None:
            self._first_at = now
            self._loop.call_soon_threadsafe(self._task.cancel)
            signal.setitimer(signal.ITIMER_REAL, self._stands_s)  # its signal ends the process
            self._loop.call_soon_threadsafe(signal.setitimer, signal.ITIMER_REAL, 0.0)
        elif now - self._first_at > TWICE_S:
            os.write(2, b"ended at once; what was written before is kept\n")
            os._exit(128 + number)


class _Sigaction(ctypes.Structure):
    """struct sigaction as the C libraries of 64-bit Linux have it."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def _handle_once(number: int) -> None:
    """Makes the installed handler serve the next signal only; after it the kernel's default is back."""
    library, action = ctypes.CDLL(None), _Sigaction()
    if library.sigaction(number, None, ctypes.byref(action)) == 0:
        action.flags |= -0x80000000  # SA_RESETHAND
        library.sigaction(number, ctypes.byref(action), None)


def exit_process(status: int) -> NoReturn:
    """Ends the process. With a status other than 0 it does not join threads: nothing can interrupt one that waits."""
    if status:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)
    sys.exit(0)


def _waiting_at(waiter: Any) -> str:
    """Returns file and line of the innermost coroutine in which a suspended task waits."""
    frame = None
    while waiter is not None:
        frame = getattr(waiter, "cr_frame", None) or getattr(waiter, "ag_frame", None) or frame
        waiter = getattr(waiter, "cr_await", None) or getattr(waiter, "ag_await", None)
    if frame is None:
        return "a finished task"
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_qualname}"
