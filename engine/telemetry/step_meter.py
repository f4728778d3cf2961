"""Where the seconds of one step went, on the replicas: the idle clock from the step's begin to its end.

Invariant: `replicas/busy_s` and the sum of `idle/*_s` are the seconds of all replicas together, those that are down
included.
"""

from __future__ import annotations

from engine.telemetry.idle_clock import CAUSES
from engine.telemetry.timeline import Timeline


class StepMeter:
    """`begin`, then `read`; what lies between two steps, an evaluation say, is nobody's."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.begin()

    def begin(self) -> None:
        now = self._timeline.now()
        self._seconds = self._replica_seconds(now)
        self._held = self._timeline.idle.held(now)
        self._timeline.idle.occupancy.begin(now)

    def read(self) -> dict[str, float]:
        """Metrics since `begin`."""
        now, idle = self._timeline.now(), self._timeline.idle
        seconds = self._replica_seconds(now)
        passed = {cause: seconds[cause] - self._seconds[cause] for cause in seconds}
        held = {name: total - self._held[name] for name, total in idle.held(now).items()}
        idle.occupancy.advance(now)
        return {
            "replicas/busy_s": passed["busy"],
            "replicas/busy_share": passed["busy"] / max(1e-9, sum(passed.values())),
            **{f"idle/{cause}_s": passed[cause] for cause in CAUSES},
            "kv/blocked_s": held["kv_blocked"],
            "time/lease_wait_s": held["lease"],
            "tools/starved_s": idle.occupancy.starved_s,
            "rollout/tail_s": idle.occupancy.tail_s,
        }

    def _replica_seconds(self, now: float) -> dict[str, float]:
        """Returns the seconds of all replicas, by "busy" and cause, since the run began."""
        total = dict.fromkeys(("busy", *CAUSES), 0.0)
        for causes in self._timeline.idle.seconds(now).values():
            for cause, seconds in causes.items():
                total[cause] += seconds
        return total
