"""A reward that random weights can learn from: it needs no knowledge, only a learner and a sampler that agree."""

from __future__ import annotations

from engine.types import Trajectory


def even(trajectory: Trajectory) -> float:
    """Returns the share of the sampled tokens whose ids are even, in [0, 1]."""
    sampled = trajectory.token_ids_T[trajectory.sampled_T]
    return float((sampled % 2 == 0).mean()) if len(sampled) else 0.0
