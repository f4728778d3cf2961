"""No silent hang: a report of what every task waits for, on demand (SIGUSR1) and when nothing moves any more.

Invariants
- A run in which `progress` stands still for `silence_s` ends with `NoProgress`, which carries the report.
- A run that failed or was interrupted ends, whatever its threads do.
- Ctrl-C, SIGTERM and SIGHUP end a run in the same way: what it measured is written. One of them that comes again ends
  the process at once, also while its event loop stands still or holds the interpreter; so does a single one, after
  STANDS_S, if the loop does not move.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
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

STANDS_S = 10.0  # so long a loop that is told to end may take for its next tick
TWICE_S = 0.5  # a signal that comes again sooner is the same one, from a shell and a wrapper, say


class NoProgress(RuntimeError):
    """Nothing has moved for too long; the message lists queues and tasks."""


def report(stats: Callable[[], list[StageStats]]) -> str:
    """Queue depths and blocked seconds of each stage, then each place where tasks wait, with their number and names."""
    lines = [
        f"  stage {row.name}: {row.queue} queued, {row.items_in} in, {row.items_out} out, busy {row.busy_s:.1f} s, "
        f"blocked on input {row.blocked_in_s:.1f} s, on output {row.blocked_out_s:.1f} s"
        for row in stats()
    ]
    places: Counter[str] = Counter()
    names: dict[str, str] = {}
    for task in asyncio.all_tasks():
        place = _place(task.get_coro())
        places[place] += 1
        names.setdefault(place, task.get_name())
    lines += [f"  {count} x {place} ({names[place]})" for place, count in places.most_common()]
    return "\n".join(lines)


async def watch(progress: Callable[[], Any], stats: Callable[[], list[StageStats]], silence_s: float = 900.0) -> None:
    """Until cancelled. Raises NoProgress when progress() has returned the same value for silence_s.

    silence_s must exceed every deadline of a single wait (a learner's step, say), whose own error says more.
    """
    seen, looks = progress(), 0
    while True:
        await asyncio.sleep(silence_s / 10)
        looks = looks + 1 if progress() == seen else 0
        seen = progress()
        if looks > 10:  # not by the clock: where this process stood still (Ctrl-Z, fg) nothing could move
            raise NoProgress(f"nothing has moved for {silence_s:g} s:\n{report(stats)}")


@contextlib.contextmanager
def shows_on_signal(stats: Callable[[], list[StageStats]]) -> Iterator[None]:
    """Inside, SIGUSR1 prints the report with the stages of a run, and before it the stack of the loop. A loop that runs
    in another thread than the main one hears of no signals.
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
    """The stack is printed by a handler in C, so also while the loop stands still."""
    faulthandler.unregister(signal.SIGUSR1)
    report_now = partial(_print_report, stats)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, report_now)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False, chain=True)


def _print_report(stats: Callable[[], list[StageStats]]) -> None:
    print(report(stats), file=sys.stderr, flush=True)


@contextlib.contextmanager
def end_on_signals(task: asyncio.Task[Any], stands_s: float = STANDS_S) -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and the end of the terminal (SIGHUP) cancel the task, which then writes what it has. A
    run under nohup, which ignores SIGHUP, goes on. SIGUSR1 prints where its tasks wait. stands_s: how long the loop may
    take for its next tick then; after it the stack is printed, and SIGALRM ends the process. In the main thread.
    """
    ending = _Ending(task, asyncio.get_running_loop(), stands_s)
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
    """The signals' handler. Python runs it between two instructions of the main thread. Where none follows (a library
    computes), it does not run, and the next signal finds the kernel's own action, which is to end the process.
    """

    def __init__(self, task: asyncio.Task[Any], loop: asyncio.AbstractEventLoop, stands_s: float) -> None:
        self._task, self._loop, self._stands_s = task, loop, stands_s
        self._first_at: float | None = None

    def take(self, number: int) -> None:
        signal.signal(number, self._handle)
        _handle_once(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.take(number)
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            self._loop.call_soon_threadsafe(self._task.cancel)
            signal.setitimer(signal.ITIMER_REAL, self._stands_s)  # its signal ends the process
            self._loop.call_soon_threadsafe(signal.setitimer, signal.ITIMER_REAL, 0.0)
        elif now - self._first_at > TWICE_S:
            os.write(2, b"ended at once; what was written down is kept\n")
            os._exit(128 + number)


class _Sigaction(ctypes.Structure):
    """The structure that the C libraries of 64-bit Linux use."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def _handle_once(number: int) -> None:
    """The handler that is there now is for the next signal only; the one after it has the kernel's default."""
    library, action = ctypes.CDLL(None), _Sigaction()
    if library.sigaction(number, None, ctypes.byref(action)) == 0:
        action.flags |= -0x80000000  # SA_RESETHAND
        library.sigaction(number, ctypes.byref(action), None)


def exit_process(status: int) -> NoReturn:
    """End the process. With a status other than 0 its threads are left alone: nothing can interrupt one that waits."""
    if status:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)
    sys.exit(0)


def _place(waiter: Any) -> str:
    """File and line of the innermost coroutine that a suspended task waits in."""
    frame = None
    while waiter is not None:
        frame = getattr(waiter, "cr_frame", None) or getattr(waiter, "ag_frame", None) or frame
        waiter = getattr(waiter, "cr_await", None) or getattr(waiter, "ag_await", None)
    if frame is None:
        return "a finished task"
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_qualname}"
