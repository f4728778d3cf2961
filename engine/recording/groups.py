"""Makes the records of a step's groups, and says which rows of the step's batch are which of their sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from engine.recording.records import GroupRow, GroupTokens, PartTokens, RecordedGroup, StepRow
from engine.types import NO_PROMPT, Batch, Group, LearnerNumbers, Segment, Trajectory

# Explains a selector's choice: returns numbers for each trajectory of a group (`algo.group.batch.Selection.explain`).
Explain = Callable[[Group], Sequence[Mapping[str, float]]]

_NO_IDS, _NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)
_NO_TOKENS: dict[str, Any] = {
    "token_ids_T": _NO_IDS,
    "sampled_T": np.zeros(0, np.bool_),
    "logprobs_T": _NO_LOGPROBS,
    "versions_T": _NO_IDS,
    "teacher": None,
    "routes": None,
}


class Place(NamedTuple):
    """Names a token sequence of a step by numbers: group, trajectory, and which of the trajectory's parts."""

    group: int
    trajectory: int
    part: int


def whole_groups(groups: Sequence[Group], count: int) -> list[int]:
    """Returns the groups whose tokens are recorded with their numbers: the first that are trained, then others."""
    order = sorted(range(len(groups)), key=lambda number: not groups[number].kept)
    return sorted(order[:count])


def places_of(batch: Batch, groups: Sequence[Group], numbers: Sequence[int]) -> dict[int, Place]:
    """Returns {row of the batch: whose sequence it is} for the trained trajectories of some groups.

    A row of another length is left out: the recipe trained something else than was sampled.
    """
    trajectories = {
        (groups[number].prompt.id, groups[number].trajectories[index].sample): (number, index)
        for number in numbers
        for index in groups[number].kept
    }
    places = {}
    for row, (name, length) in enumerate(zip(batch.rows, batch.lengths_B.tolist(), strict=False)):
        number, index = trajectories.get((name.prompt_id, name.sample), (None, None))
        if number is None or index is None:
            continue
        parts = groups[number].trajectories[index].parts
        if name.part < len(parts) and len(parts[name.part].token_ids_T) == length:
            places[row] = Place(number, index, name.part)
    return places


@dataclass(frozen=True, kw_only=True)
class StepRecords:
    """Makes the records of one step. Runs in a thread: it only reads.

    whole: the groups whose tokens have numbers. explain: what the selector says, if it says anything. nodes: by lease,
    who made the group.
    """

    step: int
    groups: Sequence[Group]
    whole: Sequence[int]
    nodes: Mapping[int, str] = field(default_factory=dict)
    explain: Explain | None = None

    def row(self, finished_at: float) -> StepRow:
        """Returns what remains of the step when it is thinned. finished_at: when its weights were live."""
        starts = [member.started_at for group in self.groups for member in group.trajectories]
        return StepRow(
            step=self.step,
            started_at=min(starts, default=finished_at),
            finished_at=finished_at,
            groups=tuple(_row(group) for group in self.groups),
        )

    def records(self) -> list[RecordedGroup]:
        """Returns the groups without their tokens."""
        return [
            RecordedGroup(
                step=self.step,
                number=number,
                group=_without_tokens(group),
                reasons=self._reasons(group),
                node=self.nodes.get(group.lease, ""),
                whole=number in self.whole,
            )
            for number, group in enumerate(self.groups)
        ]

    def tokens(self, learner: Mapping[Place, LearnerNumbers]) -> list[GroupTokens]:
        """Returns the tokens of each group. learner: what it computed for the sequences of the whole groups."""
        return [
            GroupTokens(
                number=number,
                trajectories=tuple(
                    tuple(
                        _tokens(part, whole=number in self.whole, learner=learner.get(Place(number, index, at)))
                        for at, part in enumerate(trajectory.parts)
                    )
                    for index, trajectory in enumerate(group.trajectories)
                ),
            )
            for number, group in enumerate(self.groups)
        ]

    def _reasons(self, group: Group) -> tuple[dict[str, float], ...]:
        if self.explain is None:
            return ({},) * len(group.trajectories)
        return tuple({name: float(value) for name, value in reasons.items()} for reasons in self.explain(group))


def _without_tokens(group: Group) -> Group:
    """Returns the group as it is recorded. A recipe's stage may have made advantages_K a list, or of another dtype."""
    advantages_K = None if group.advantages_K is None else np.asarray(group.advantages_K, np.float64)
    return replace(group, trajectories=tuple(map(_bare, group.trajectories)), advantages_K=advantages_K)


def _bare(member: Trajectory) -> Trajectory:
    segments = tuple(replace(segment, **_NO_TOKENS) for segment in member.segments)
    return replace(member, prompt=NO_PROMPT, text="", segments=segments, states={}, **_NO_TOKENS)


def _tokens(part: Trajectory | Segment, *, whole: bool, learner: LearnerNumbers | None) -> PartTokens:
    if not whole:
        return PartTokens(token_ids_T=part.token_ids_T, sampled_T=part.sampled_T)
    return PartTokens(
        token_ids_T=part.token_ids_T,
        sampled_T=part.sampled_T,
        logprobs_T=part.logprobs_T,
        versions_T=part.versions_T,
        learner_logprobs_T=None if learner is None else learner.logprobs_T,
        learner_entropy_T=None if learner is None else learner.entropy_T,
        learner_logprob_gradient_T=None if learner is None else learner.logprob_gradient_T,
        minibatch=None if learner is None else learner.minibatch,
        teacher_logprobs_T=None if part.teacher is None else part.teacher.logprobs_T,
    )


def _row(group: Group) -> GroupRow:
    return GroupRow(
        prompt_id=group.prompt.id,
        source=group.prompt.source,
        drop=group.drop,
        rewards=tuple(member.reward for member in group.trajectories),
        sampled_tokens=tuple(member.sampled_tokens for member in group.trajectories),
        kept=group.kept,
        refills=group.refills,
    )
