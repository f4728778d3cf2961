"""The placement of the barrier: no turn starts before every other trajectory has its tool results."""

from __future__ import annotations

from bench.placement.policies import StaticSplit
from engine.balancing.balancer import Place


class Lockstep(StaticSplit):
    """Lets turns go in lockstep over all replicas."""

    def decide(self, now: float) -> list[Place]:
        return [] if self.waiting() < len(self._all) else super().decide(now)
