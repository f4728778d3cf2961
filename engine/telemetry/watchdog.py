"""No silent hang: a report of what every task waits for, on demand (SIGUSR1) and when nothing moves any more.

Invariants
- A run in which `progress` stands still for `silence_s` ends with `NoProgress`, which carries the report.
- A run that failed or was interrupted ends, whatever its threads do.
- SIGTERM and SIGHUP end a run in the same way: what it measured is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

from engine.pipeline.pipeline import StageStats


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


def dump(stats: Callable[[], list[StageStats]]) -> None:
    """For a signal handler."""
    print(report(stats), file=sys.stderr, flush=True)


def end_on_signals(task: asyncio.Task[Any]) -> None:
    """SIGTERM and the end of the terminal (SIGHUP) cancel the task, which then writes what it has. A run under nohup,
    which ignores SIGHUP, goes on. SIGUSR1 prints where its tasks wait.
    """
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: dump(list))  # a run that has stages says more
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, task.cancel)


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
