"""Measures how long the teacher is at work, and how much of that overlaps with rollouts. Pure: times go in."""

from __future__ import annotations


class OverlapMeter:
    """Adds up seconds while something is scored, and those of them in which rollouts are under way too.

    >>> meter = OverlapMeter()
    >>> meter.change(0.0, rolling=1); meter.change(1.0, scoring=1); meter.change(3.0, rolling=-1)
    >>> meter.change(4.0, scoring=-1); meter.read(9.0)
    (3.0, 2.0)
    """

    def __init__(self) -> None:
        self._rolling = self._scoring = 0
        self._since = self._busy_s = self._overlap_s = 0.0

    def change(self, now: float, *, rolling: int = 0, scoring: int = 0) -> None:
        """Notes that so many rollouts and scorings more, or fewer, are under way from now on."""
        if self._scoring:
            self._busy_s += now - self._since
            self._overlap_s += (now - self._since) * bool(self._rolling)
        self._since = now
        self._rolling += rolling
        self._scoring += scoring

    def read(self, now: float) -> tuple[float, float]:
        """Returns (seconds of scoring, those that overlapped) since the last call."""
        self.change(now)
        seconds = self._busy_s, self._overlap_s
        self._busy_s = self._overlap_s = 0.0
        return seconds
