"""From a graded group to what is trained of it: selection, advantages, or a reason to drop it.

Invariants
- Deterministic given the run's seed and the prompt: the order in which groups finish does not matter.
- Trajectories with an infrastructure error are never trained and never count as failures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from algo.group.advantages import group_advantages, is_flat
from engine.ports import Selector
from engine.types import Batch, Group


def select_and_score(selector: Selector, seed: int, *, divide_by_std: bool = True) -> Callable[[Group], Group]:
    """A function for `engine.stages.group.groups`: sets kept and advantages_K, or drop ("error" or "flat"). Raises
    ValueError for a selector that gives an index twice.

    Advantages are normalised over the kept trajectories (rStar2-Agent, arXiv 2508.20722: over the G that RoC keeps).
    """

    def select(group: Group) -> Group:
        usable = [index for index, member in enumerate(group.trajectories) if member.error is None]
        if len(usable) < 2:
            return replace(group, drop="error")
        digest = hashlib.blake2b(f"{seed}/{group.prompt.id}".encode(), digest_size=8).digest()
        rng = np.random.default_rng(int.from_bytes(digest, "big"))
        chosen = selector([group.trajectories[index] for index in usable], rng)
        kept = [usable[index] for index in chosen]
        if len(set(kept)) < len(kept):  # a mask, or drawn with replacement: trained twice, and counted as sampled twice
            raise ValueError(f"the selector must give different indices, got {chosen}")
        rewards_K = np.asarray([group.trajectories[index].reward for index in kept], np.float64)
        if is_flat(rewards_K):
            return replace(group, drop="flat")
        return replace(group, kept=tuple(kept), advantages_K=group_advantages(rewards_K, divide_by_std=divide_by_std))

    return select


def make_batch(step: int, groups: Sequence[Group]) -> Batch:
    """What one step trains: the kept trajectories of its groups, in order. Empty when every group was dropped.

    Raises ValueError for what another temperature than 1 sampled: replicas give the log-probabilities of temperature 1,
    so that it would be trained as if it had been sampled with these, and no check could see it.
    """
    kept = [group.trajectories[index] for group in groups for index in group.kept]
    if others := {member.temperature for member in kept} - {1.0}:
        raise ValueError(f"only what temperature 1 sampled can be trained (RolloutConfig.temperature), got {others}")
    advantages = [value for group in groups if group.advantages_K is not None for value in group.advantages_K]
    return Batch.of(step, kept, np.asarray(advantages, np.float32))
