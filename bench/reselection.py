"""What became of recorded groups, as their run selected them and under another selection. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal

import numpy as np

from algo.group.batch import Selection
from algo.group.roc import RoC, error_penalty, format_penalty
from engine.types import Group, Trajectory

Penalties = Literal["both", "errors", "format", "none"]
KnownPenalties = Mapping[tuple[str, int], tuple[float, float]]
"""p_err and p_format by prompt and sample, as a run has recorded them."""


@dataclass(frozen=True, slots=True)
class OtherRoC(RoC):
    """RoC with other penalties or another quota. known: p_err and p_format by prompt and sample, where recorded."""

    penalties: Penalties = "both"
    failures: float | None = None
    known: KnownPenalties = field(default_factory=dict)

    def quota(self, positives: int, negatives: int) -> tuple[int, int]:
        if self.failures is None:
            return RoC.quota(self, positives, negatives)
        kept = min(negatives, max(self.keep - positives, round(self.failures * self.keep)))
        return self.keep - kept, kept

    def penalty(self, trajectory: Trajectory) -> float:
        known = self.known.get((trajectory.prompt.id, trajectory.sample))
        p_err, p_format = known or (error_penalty(trajectory), format_penalty(trajectory))
        return {"both": p_err + p_format, "errors": p_err, "format": p_format, "none": 0.0}[self.penalties]


@dataclass(slots=True)
class Counts:
    """What became of some groups, as the run did it and under the other selection.

    recorded: trajectories of the record; trajectories: those that are looked at. rewards_changed: trajectories whose
    reward is another one. graded: trajectories with a reward; correct: with a reward above 0. flat: groups dropped as
    flat or for errors. kept: trained trajectories; kept_others: those of the other selection that the run did not
    train. tokens: sampled tokens of the kept. advantage: sum of their absolute values. errors: sum of p_err over kept
    correct ones. reproduced: groups that the run's own settings select as recorded, of the comparable ones.
    """

    groups: int = 0
    recorded: int = 0
    trajectories: int = 0
    rewards_changed: int = 0
    ungraded: int = 0
    graded: int = 0
    other_graded: int = 0
    correct: int = 0
    other_correct: int = 0
    flat: int = 0
    other_flat: int = 0
    kept: int = 0
    other_kept: int = 0
    kept_others: int = 0
    tokens: int = 0
    other_tokens: int = 0
    advantage: float = 0.0
    other_advantage: float = 0.0
    kept_correct: int = 0
    other_kept_correct: int = 0
    errors: float = 0.0
    other_errors: float = 0.0
    reproduced: int = 0
    comparable: int = 0
    dropped_later: int = 0

    def __iadd__(self, other: Counts) -> Counts:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        return self

    def row(self) -> dict[str, float | None]:
        """Returns the counts, and the means that follow from them; None for what was not measured."""
        counts: dict[str, float | None] = asdict(self)
        means = {
            "correct_share": _share(self.correct, self.graded),
            "other_correct_share": _share(self.other_correct, self.other_graded),
            "mean_advantage": _share(self.advantage, self.kept),
            "other_mean_advantage": _share(self.other_advantage, self.other_kept),
            "error_share": _share(self.errors, self.kept_correct),
            "other_error_share": _share(self.other_errors, self.other_kept_correct),
        }
        if not self.groups:
            return dict.fromkeys([*counts, *means]) | {"groups": 0}
        if not self.graded:
            counts["correct"] = None
        if not self.other_graded:
            counts["other_correct"] = counts["rewards_changed"] = None
        return counts | means


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None


def unselected(group: Group) -> Group:
    """Returns the group as it was before the selection."""
    return replace(group, kept=(), advantages_K=None, drop=None)


def compared(
    recorded: Group,
    was: Group,
    now: Group,
    own: Selection | None,
    known: KnownPenalties,
) -> Counts:
    """Counts a group. recorded: as it was put out; was: the same with its advantages; now: under the other selection.
    own: the run's selection, None if it is not known.
    """
    counts = Counts(groups=1, recorded=len(recorded.trajectories), trajectories=len(now.trajectories))
    old = {member.sample: member for member in recorded.trajectories}
    for member in now.trajectories:
        counts.rewards_changed += member.reward is not None and member.reward != old[member.sample].reward
        counts.ungraded += member.reward is None and old[member.sample].reward is not None
    for name, group in (("", was), ("other_", now)):
        kept = [group.trajectories[index] for index in group.kept]
        right = [member for member in kept if (member.reward or 0) > 0]
        totals = {
            "graded": sum(member.reward is not None for member in group.trajectories),
            "correct": sum((member.reward or 0) > 0 for member in group.trajectories),
            "flat": int(group.drop is not None),
            "kept": len(kept),
            "tokens": sum(member.sampled_tokens for member in kept),
            "advantage": 0.0 if group.advantages_K is None else float(np.abs(group.advantages_K).sum()),
            "kept_correct": len(right),
            "errors": sum(_error_share(member, known) for member in right),
        }
        for key, value in totals.items():
            setattr(counts, f"{name}{key}", value)
    trained = {was.trajectories[index].sample for index in was.kept}
    counts.kept_others = sum(now.trajectories[index].sample not in trained for index in now.kept)
    if recorded.drop not in (None, "flat", "error"):
        counts.dropped_later = 1  # by a stage of the recipe's own, which is not run here
    elif own is not None:
        again = own(unselected(recorded))
        counts.comparable = 1
        counts.reproduced = int((again.kept, again.drop) == (recorded.kept, recorded.drop))
    return counts


def _error_share(member: Trajectory, known: KnownPenalties) -> float:
    recorded = known.get((member.prompt.id, member.sample))
    return error_penalty(member) if recorded is None else recorded[0]
