"""Measures what the stages of the pipeline did in one step, by their counts at its beginning and at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine import metric_names as metric
from engine.pipeline.pipeline import StageStats


class StageMeter:
    """Measures from `begin` to `read`. stats: returns the counts of each stage since the run began."""

    def __init__(self, stats: Callable[[], Sequence[StageStats]]) -> None:
        self._stats = stats
        self._before: dict[str, StageStats] = {}

    def begin(self) -> None:
        self._before = {row.name: row for row in self._stats()}

    def read(self) -> dict[str, float]:
        """Returns the metrics since `begin`. The queue is the present one."""
        metrics: dict[str, float] = {}
        for row in self._stats():
            before = self._before.get(row.name)
            for name, value, so_far in (
                (metric.STAGE_BUSY_S, row.busy_s, before and before.busy_s),
                (metric.STAGE_BLOCKED_IN_S, row.blocked_in_s, before and before.blocked_in_s),
                (metric.STAGE_BLOCKED_OUT_S, row.blocked_out_s, before and before.blocked_out_s),
                (metric.STAGE_ITEMS, row.items, before and before.items),
                (metric.STAGE_QUEUE, row.queue, 0),
            ):
                metrics[metric.member(name, row.name)] = value - (so_far or 0)
        return metrics
