"""Measures how long a run takes to start, part by part."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil


class Startup:
    """Notes when each part is up, in seconds since this process began."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def reached(self, part: str) -> None:
        """Notes that a part is up; only the first time counts."""
        self._until.setdefault(part, seconds_since_start())

    @property
    def first_step_s(self) -> float | None:
        """None if no step was trained, as all were trained before."""
        return self._until.get("first step")

    @property
    def parts_s(self) -> dict[str, float]:
        return durations(self._until)


def durations(reached: Mapping[str, float]) -> dict[str, float]:
    """Returns how long each part took, given when each was up.

    >>> durations({"imports": 2.0, "engines": 5.5})
    {'imports': 2.0, 'engines': 3.5}
    """
    return {part: end - begin for (part, end), begin in zip(reached.items(), [0.0, *reached.values()], strict=False)}


def seconds_since_start() -> float:
    """Returns the age of this process."""
    return time.time() - psutil.Process().create_time()
