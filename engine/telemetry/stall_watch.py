"""Names the line that blocks an event loop, reports it after a while, and ends a process whose loop stays blocked.

Invariants
- While the loop serves its ticks, the thread does nothing but wake up every LOOK_S.
- A loop that is blocked for SAID_S is reported, and after `silence_s` the process ends. This holds also if the blocking
  code lets no other thread run (a regular expression that never ends, for example). Then CPU seconds count, and the
  kernel acts: faulthandler prints the stack, and SIGPROF kills the process.
- A process that was stopped (Ctrl-Z, fg) was not blocked: only time that the thread observed counts.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, Self

LOOK_S = 0.02
SAID_S = 60.0
SEEN_S = 1.0  # at most this much of the time between two looks counts
_STDERR = 2
_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


@dataclass(kw_only=True)
class Stall:
    """Decides what to do about a blocked loop. Pure: observations go in, actions come out.

    >>> stall = Stall(said_s=1.0, silence_s=2.0)
    >>> [stall.look(late=True, passed_s=0.5) for _ in range(4)]
    [None, 'say', None, 'end']
    """

    said_s: float
    silence_s: float
    seconds: float = 0.0
    is_said: bool = False

    def look(self, *, late: bool, passed_s: float) -> Literal["say", "end"] | None:
        """Returns what to do now. late: the loop has not served its tick. passed_s: seconds since the last look."""
        if not late:
            self.seconds, self.is_said = 0.0, False
            return None
        self.seconds += min(passed_s, SEEN_S)
        if self.seconds >= self.silence_s:
            return "end"
        if self.seconds >= self.said_s and not self.is_said:
            self.is_said = True
            return "say"
        return None


class StallWatch:
    """Watches the loop of the thread that enters it: `with StallWatch(overdue_s) as watch`.

    A line of another thread is named where the loop is ready and that thread has the interpreter (the GIL).

    overdue_s: returns how late the loop is, 0 or less if it is not. seconds: how long each line, "file.py:12 function",
    blocked the loop. say: takes a line for the user. end: ends the process. The watching thread calls all three.
    """

    def __init__(
        self,
        overdue_s: Callable[[], float],
        *,
        say: Callable[[str], None] = lambda line: None,
        end: Callable[[], None] = lambda: None,
        said_s: float = SAID_S,
        silence_s: float = float("inf"),
    ) -> None:
        self.seconds: dict[str, float] = {}
        self._overdue_s = overdue_s
        self._say, self._end = say, end
        self._stall = Stall(said_s=said_s, silence_s=silence_s)
        self._thread = threading.get_ident()
        self._over = threading.Event()
        self._computed_s: dict[int, float] = {}  # by thread, up to the last time that it was looked for

    def __enter__(self) -> Self:
        faulthandler.register(signal.SIGVTALRM, file=_STDERR, all_threads=False)
        faulthandler.register(signal.SIGPROF, file=_STDERR, all_threads=False, chain=True)
        self._watcher = threading.Thread(target=self._look, name="stall-watch", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()
        _set_timers(0.0, 0.0)
        faulthandler.unregister(signal.SIGVTALRM)
        faulthandler.unregister(signal.SIGPROF)

    def _look(self) -> None:
        seen_s, looked_at = 0.0, time.perf_counter()
        while not self._over.wait(LOOK_S):
            _set_timers(self._stall.said_s, self._stall.silence_s)  # they fire if this thread cannot run to reset them
            now, late_s = time.perf_counter(), self._overdue_s()
            passed_s, looked_at = now - looked_at, now
            if late_s <= 0:
                seen_s = 0.0
                self._stall.look(late=False, passed_s=passed_s)
                continue
            if (place := self._place()) is not None:
                more_s = late_s - seen_s if late_s > seen_s else late_s
                self.seconds[place] = self.seconds.get(place, 0.0) + more_s
                seen_s = late_s
                self._act(self._stall.look(late=True, passed_s=passed_s), place)

    def _place(self) -> str | None:
        """Returns where the event loop is held up; None without it. No frame outlives this call: one that is kept
        keeps all that its variables refer to, and an array in use by one cannot grow.
        """
        frames = sys._current_frames()
        frame = frames.get(self._thread)
        if frame is None:
            return None
        return self._holder(frames) if _is_in_no_callback(frame) else place_of(frame)

    def _holder(self, frames: Mapping[int, FrameType]) -> str:
        """Returns where the thread is that computed most since the last look."""
        before, self._computed_s = self._computed_s, _computed_s()
        own = (self._thread, threading.get_ident())
        others = [thread for thread in threading.enumerate() if thread.ident not in own and thread.ident in frames]
        busiest = max(others, key=lambda each: self._more(before, each.native_id), default=None)
        if busiest is None or not self._more(before, busiest.native_id):
            return "the event loop itself"
        return f"{place_of(frames[busiest.ident or 0])} (in thread {busiest.name})"

    def _more(self, before: Mapping[int, float], thread: int | None) -> float:
        return self._computed_s.get(thread or 0, 0.0) - before.get(thread or 0, 0.0)

    def _act(self, action: Literal["say", "end"] | None, place: str) -> None:
        blocked = f"the event loop has been blocked for {self._stall.seconds:.0f} s at {place}"
        fix = "Fix: await there, or move the computation into a thread (asyncio.to_thread)"
        if action == "say":
            self._say(f"{blocked}; after {self._stall.silence_s:g} s the process ends. {fix}")
        elif action == "end":
            self._say(f"{blocked}; the process ends. {fix}")
            self._end()


def _computed_s() -> dict[int, float]:
    """Returns the seconds that each thread of this process has computed, by its number in the kernel."""
    computed_s = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError, ValueError):  # it has just ended
            computed_s[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return computed_s


def _is_in_no_callback(frame: FrameType) -> bool:
    """Returns whether a loop's thread runs the loop itself: it is ready, but another thread has the interpreter."""
    return frame.f_code.co_filename.endswith(("asyncio/runners.py", "asyncio/base_events.py", "/selectors.py"))


def _set_timers(said_s: float, silence_s: float) -> None:
    """Sets timers that run on this process's CPU time. A timer of 0 or infinity never fires."""
    for timer, seconds in ((signal.ITIMER_VIRTUAL, said_s), (signal.ITIMER_PROF, silence_s)):
        signal.setitimer(timer, seconds if seconds < 1e8 else 0.0)


def place_of(frame: FrameType) -> str:
    """Returns the innermost line outside of libraries, else the innermost line."""
    outside: FrameType | None = frame
    while outside is not None and outside.f_code.co_filename.startswith((*_LIBRARY, "<")):
        outside = outside.f_back
    shown = outside or frame
    name = shown.f_code.co_filename.rpartition("/")[2]
    return f"{name}:{shown.f_lineno} {shown.f_code.co_qualname}"
