"""The rule by which the report ends its first stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

from engine import metric_names as metric
from sandbox.require import at_least, require, require_fields, within


@dataclass(frozen=True, kw_only=True, slots=True)
class Plateau:
    """Ends a stage when the share of truncated rollouts has stopped changing, as the report ends its first stage.

    >>> Plateau(window=2, level=0.05, change=0.01).reached([0.0, 0.0, 0.2, 0.1, 0.1, 0.104])
    False
    >>> Plateau(window=2, level=0.05, change=0.01).reached([0.0, 0.0, 0.1, 0.1, 0.1, 0.104])
    True
    """

    window: Annotated[int, "steps whose mean is compared with the mean of as many before"] = 20
    level: Annotated[float, "least mean share of truncated rollouts; below it there is room"] = 0.05
    change: Annotated[float, "largest difference of the two means"] = 0.01

    def __post_init__(self) -> None:
        require("window", self.window, at_least(1))
        require_fields(self, within("[0, 1]"), "level", "change")

    def reached(self, shares: Sequence[float]) -> bool:
        """Returns whether the plateau is reached. shares: one of each step so far, in order."""
        if len(shares) < 2 * self.window:
            return False
        before, now = fmean(shares[-2 * self.window : -self.window]), fmean(shares[-self.window :])
        return now >= self.level and abs(now - before) <= self.change

    def enough(self, steps: Sequence[Mapping[str, float]]) -> str | None:
        """Returns why the stage ends after these steps, or None.

        steps: rows of metrics.jsonl, as `Training.train` gives them.
        """
        truncated = metric.member(metric.STOP, "length")
        if not self.reached([row[truncated] / max(1.0, row[metric.ROLLOUT_TRAJECTORIES]) for row in steps]):
            return None
        return f"after step {steps[-1]['step']:.0f} the share of truncated rollouts is on a plateau"
