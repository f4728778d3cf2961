"""From a graded group to what is trained of it: selection, advantages, or a reason to drop it.

Invariants
- Deterministic given the run's seed and the prompt: the order in which groups finish does not matter.
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
    """Called with a group: sets kept and advantages_K, or drop ("error" or "flat"). `select_and_score` makes it."""

    selector: Selector
    seed: int
    advantage: Advantage = GRPO

    def __call__(self, group: Group) -> Group:
        """Raises ValueError for a selector that gives no indices, or one twice."""
        usable = _usable(group)
        alone = self.advantage.baseline == "batch"  # then a trajectory is compared with those of other groups
        if len(usable) < (1 if alone else 2):
            return replace(group, drop="error")
        digest = hashlib.blake2b(f"{self.seed}/{group.prompt.id}".encode(), digest_size=8).digest()
        rng = np.random.default_rng(int.from_bytes(digest, "big"))
        # As a tuple: what it would sort or shorten is what its indices are of.
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
            indices = [operator.index(index) for index in chosen]  # numpy's are integers too
            is_mask = any(isinstance(index, bool) for index in chosen)  # it would be read as the indices 0 and 1
            if not is_mask and len(set(indices)) == len(indices) and all(0 <= index < members for index in indices):
                return indices
        except TypeError:  # no list of integers
            pass
        name = getattr(self.selector, "__name__", type(self.selector).__name__)
        raise ValueError(
            f"the selector {name} must give different indices of the {members} trajectories, got {chosen!r:.100}. "
            f"Fix: a list of whole numbers from 0 to {members - 1}, each once"
        )

    def explain(self, group: Group) -> list[Mapping[str, float]]:
        """What the selector says of its choice, for each trajectory of a group; nothing of those that failed, and
        nothing at all where it has no `explain` or the group was given up before its choice.
        """
        said: list[Mapping[str, float]] = [{} for _ in group.trajectories]
        usable = _usable(group)
        explain = getattr(self.selector, "explain", None)
        if explain is None or len(usable) < 2 or any(group.trajectories[index].reward is None for index in usable):
            return said
        for index, reasons in zip(usable, explain([group.trajectories[index] for index in usable]), strict=True):
            said[index] = reasons
        return said


def _usable(group: Group) -> list[int]:
    return [index for index, member in enumerate(group.trajectories) if member.error is None]


def select_and_score(selector: Selector, seed: int, *, advantage: Advantage = GRPO) -> Selection:
    """A function for `engine.stages.group.groups`: sets kept and advantages_K, or drop ("error" or "flat"). Raises
    ValueError for a selector that gives no indices, or one twice.

    Advantages are those of the kept trajectories among themselves (rStar2-Agent, arXiv 2508.20722: over the G that RoC
    keeps). With the scale or baseline of a batch there are none before `make_batch`, which has to be told the same:

        advantage = Advantage(scale="batch")
        select = select_and_score(selector, seed, advantage=advantage)
        join_batch = partial(make_batch, advantage=advantage)
    """
    return Selection(selector=selector, seed=seed, advantage=advantage)


def rewards(group: Group) -> NDArray[np.float64]:
    """Of the kept trajectories, [K]."""
    return np.asarray([group.trajectories[index].reward for index in group.kept], np.float64)


def lengths(group: Group) -> NDArray[np.int64]:
    """Sampled tokens of the kept trajectories, [K]."""
    return np.asarray([group.trajectories[index].sampled_tokens for index in group.kept], np.int64)


def make_batch(step: int, groups: Sequence[Group], *, advantage: Advantage = GRPO) -> Batch:
    """What one step trains: the kept trajectories of its groups, in order. Empty when every group was dropped.

    Raises ValueError for what another temperature than 1 sampled: replicas give the log-probabilities of temperature 1,
    so that it would be trained as if it had been sampled with these, and no check could see it. And for groups that
    were prepared with an advantage of groups where this one is of the batch, or the other way round.
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
        raise ValueError(f"only what temperature 1 sampled can be trained (RolloutConfig.temperature), got {others}")
    found = [group.advantages_K for group in trained if group.advantages_K is not None]
    if by_batch:
        found = advantage.of_batch([rewards(group) for group in trained], [lengths(group) for group in trained])
    advantages_B = np.concatenate(found) if found else np.zeros(0)
    return Batch.of(step, kept, advantages_B.astype(np.float32))
