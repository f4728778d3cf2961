"""Names the line at which an event loop stands still: a thread that looks at the loop's own when a tick is overdue.

Invariant: while the loop serves its ticks the thread only wakes up, every LOOK_S.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

LOOK_S = 0.02
_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class StallWatch:
    """`with StallWatch(overdue_s) as watch` in the loop's own thread. overdue_s: how late the loop is, 0 or less where
    it is not. seconds: for which the loop stood at each place, "file.py:12 function".
    """

    def __init__(self, overdue_s: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self._overdue_s = overdue_s
        self._thread = threading.get_ident()
        self._over = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._look, name="stall-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _look(self) -> None:
        seen_s = 0.0
        while not self._over.wait(LOOK_S):
            late_s = self._overdue_s()
            if late_s <= 0:
                seen_s = 0.0
                continue
            frame = sys._current_frames().get(self._thread)
            if frame is not None:
                place = place_of(frame)
                more_s = late_s - seen_s if late_s > seen_s else late_s
                self.seconds[place] = self.seconds.get(place, 0.0) + more_s
                seen_s = late_s


def place_of(frame: FrameType) -> str:
    """The innermost line that is no library's, or the innermost one."""
    found: FrameType | None = frame
    while found is not None and found.f_code.co_filename.startswith((*_LIBRARY, "<")):
        found = found.f_back
    found = found or frame
    name = found.f_code.co_filename.rpartition("/")[2]
    return f"{name}:{found.f_lineno} {found.f_code.co_qualname}"
