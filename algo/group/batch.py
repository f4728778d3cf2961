"""Turns a graded group into what is trained, selected trajectories and their advantages, or drops it with a reason.

Invariants
- The result depends on the run's seed and the prompt alone: the order in which groups finish does not matter.
- Trajectories with an infrastructure error are never trained and never count as failures.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from algo.group.advantages import Advantage, is_flat
from engine.ports import Selector
from engine.types import Batch, Group

GRPO = Advantage()


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Sets a group's kept and advantages_K, or its drop ("error" or "flat"). `select_and_score` makes it."""

    selector: Selector
    seed: int
    advantage: Advantage = GRPO
    keep_flat: bool = False

    def __call__(self, group: Group) -> Group:
        """Returns the group with its selection. Raises ValueError if the selector gives no indices, or one twice."""
        usable = _usable(group)
        # A trajectory is then compared with those of other groups, or learnt from whatever its reward.
        alone = self.advantage.baseline == "batch" or self.keep_flat
        if len(usable) < (1 if alone else 2):
            return replace(group, drop="error")
        digest = hashlib.blake2b(f"{self.seed}/{group.prompt.id}".encode(), digest_size=8).digest()
        rng = np.random.default_rng(int.from_bytes(digest, "big"))
        # The selector gets a tuple: if it sorted or shortened a list, its indices would mean other trajectories.
        chosen = self.selector(tuple(group.trajectories[index] for index in usable), rng)
        kept = [usable[index] for index in self._indices(chosen, len(usable))]
        group = replace(group, kept=tuple(kept))
        rewards_K = rewards(group)
        if is_flat(rewards_K) and not alone:
            return replace(group, kept=(), drop="flat")
        if self.advantage.over_batch:
            return group
        return replace(group, advantages_K=self.advantage.of_group(rewards_K, lengths(group)))

    def _indices(self, chosen: Any, members: int) -> list[int]:
        try:
            chosen = list(chosen)
            indices = [operator.index(index) for index in chosen]  # numpy's integers too
            is_mask = any(isinstance(index, bool) for index in chosen)  # a mask would be read as the indices 0 and 1
            if not is_mask and len(set(indices)) == len(indices) and all(0 <= index < members for index in indices):
                return indices
        except TypeError:  # not a list of integers
            pass
        name = getattr(self.selector, "__name__", type(self.selector).__name__)
        raise ValueError(
            f"the selector {name} must give different indices of the {members} trajectories, got {chosen!r:.100}. "
            f"Fix: return a list of whole numbers from 0 to {members - 1}, each once"
        )

    def explain(self, group: Group) -> list[Mapping[str, float]]:
        """Returns what the selector tells about its choice, by trajectory. It is empty for trajectories that failed.

        It is empty for all if the selector has no `explain`, or if the group was given up before the choice.
        """
        explained: list[Mapping[str, float]] = [{} for _ in group.trajectories]
        usable = _usable(group)
        explain = getattr(self.selector, "explain", None)
        if explain is None or len(usable) < 2 or any(group.trajectories[index].reward is None for index in usable):
            return explained
        for index, reasons in zip(usable, explain([group.trajectories[index] for index in usable]), strict=True):
            explained[index] = reasons
        return explained


def _usable(group: Group) -> list[int]:
    return [index for index, member in enumerate(group.trajectories) if member.error is None]


def select_and_score(
    selector: Selector, seed: int, *, advantage: Advantage = GRPO, keep_flat: bool = False
) -> Selection:
    """Returns a function for `engine.stages.group.groups` that sets kept and advantages_K, or drop ("error" or "flat").

    Advantages are those of the kept trajectories among themselves (rStar2-Agent, arXiv 2508.20722: over the G that RoC
    keeps). With the scale or baseline of a batch there are none before `make_batch`, which has to be given the same
    one:

        advantage = Advantage(scale="batch")
        select = select_and_score(selector, seed, advantage=advantage)
        join_batch = partial(make_batch, advantage=advantage)

    keep_flat: keeps groups of equal rewards, with advantages of 0, for a recipe that learns from more than the reward.
    """
    return Selection(selector=selector, seed=seed, advantage=advantage, keep_flat=keep_flat)


def rewards(group: Group) -> NDArray[np.float64]:
    """Returns the rewards of the kept trajectories, [K]."""
    return np.asarray([group.trajectories[index].reward for index in group.kept], np.float64)


def lengths(group: Group) -> NDArray[np.int64]:
    """Returns the sampled tokens of the kept trajectories, [K]."""
    return np.asarray([group.trajectories[index].sampled_tokens for index in group.kept], np.int64)


def make_batch(step: int, groups: Sequence[Group], *, advantage: Advantage = GRPO) -> Batch:
    """Makes a step's batch of the kept trajectories of its groups, in order. It is empty if every group was dropped.

    Raises ValueError for trajectories that were sampled at another temperature than 1: replicas give the
    log-probabilities of temperature 1, so they would be trained as if sampled with these, and no check could notice.
    Raises ValueError too if `select_and_score` was given an advantage of groups and this one is of the batch, or the
    reverse.
    """
    trained = [group for group in groups if group.kept]
    by_batch = advantage.over_batch
    if wrong := [group for group in trained if (group.advantages_K is None) is not by_batch]:
        raise ValueError(
            f"make_batch was given {advantage}, and select_and_score another one (prompt {wrong[0].prompt.id!r}). "
            "Fix: give both the same advantage"
        )
    kept = [group.trajectories[index] for group in groups for index in group.kept]
    if others := {member.temperature for member in kept} - {1.0}:
        raise ValueError(f"RolloutConfig.temperature must be 1 for trajectories that are trained, got {sorted(others)}")
    advantages = [group.advantages_K for group in trained if group.advantages_K is not None]
    if by_batch:
        advantages = advantage.of_batch([rewards(group) for group in trained], [lengths(group) for group in trained])
    advantages_B = np.concatenate(advantages) if advantages else np.zeros(0)
    return Batch.of(step, kept, advantages_B.astype(np.float32))
