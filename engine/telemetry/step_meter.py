"""Measures where the replicas' seconds of one step went, by the idle clock at its beginning and at its end.

Invariant: `replicas/busy_s` and all `idle/*_s` add up to the seconds of all replicas, those that are down included.
"""

from __future__ import annotations

from engine import metric_names as metric
from engine.telemetry.idle_clock import CAUSES
from engine.telemetry.timeline import Timeline


class StepMeter:
    """Measures from `begin` to `read`. What happens between two steps, such as an evaluation, counts for neither."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.begin()

    def begin(self) -> None:
        now = self._timeline.now()
        self._seconds = self._replica_seconds(now)
        self._held = self._timeline.idle.held(now)
        self._timeline.idle.occupancy.begin(now)

    def read(self) -> dict[str, float]:
        """Returns the metrics since `begin`."""
        now, idle = self._timeline.now(), self._timeline.idle
        total = self._replica_seconds(now)
        seconds = {cause: total[cause] - self._seconds[cause] for cause in total}
        held = {name: so_far - self._held[name] for name, so_far in idle.held(now).items()}
        idle.occupancy.advance(now)
        return {
            metric.REPLICAS_BUSY_S: seconds["busy"],
            metric.REPLICAS_BUSY_SHARE: seconds["busy"] / max(1e-9, sum(seconds.values())),
            **{metric.member(metric.IDLE, cause): seconds[cause] for cause in CAUSES},
            metric.KV_BLOCKED_S: held["kv_blocked"],
            metric.TIME_LEASE_WAIT_S: held["lease"],
            metric.TOOLS_STARVED_S: idle.occupancy.starved_s,
            metric.ROLLOUT_TAIL_S: idle.occupancy.tail_s,
        }

    def _replica_seconds(self, now: float) -> dict[str, float]:
        """Returns the seconds of all replicas, by "busy" and cause, since the run began."""
        total = dict.fromkeys(("busy", *CAUSES), 0.0)
        for causes in self._timeline.idle.seconds(now).values():
            for cause, seconds in causes.items():
                total[cause] += seconds
        return total
