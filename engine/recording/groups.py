"""From a step's groups to their records, and which rows of the step's batch are which of their sequences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.recording.records import (
    Call,
    GroupRecord,
    GroupRow,
    GroupTokens,
    Placed,
    SequenceTokens,
    StepRow,
    TrajectoryRecord,
    TurnRecord,
)
from engine.types import Batch, Floats, Group, Segment, ToolUse, Trajectory, Turn

# What a selector says of its choice: numbers for each trajectory of a group (`algo.group.batch.Selection.explain`).
Explain = Callable[[Group], Sequence[Mapping[str, float]]]


class Place(NamedTuple):
    """A token sequence of a step."""

    group: int
    trajectory: int
    sequence: int


class LearnerNumbers(NamedTuple):
    """What the learner says of one sequence, each [T], NaN where it was not trained."""

    logprobs: Floats
    entropy: Floats
    push: Floats


def whole_groups(groups: Sequence[Group], count: int) -> list[int]:
    """The groups whose tokens are recorded with their numbers: the first that are trained, then others."""
    order = sorted(range(len(groups)), key=lambda number: not groups[number].kept)
    return sorted(order[:count])


def rows_of(batch: Batch, groups: Sequence[Group], numbers: Sequence[int]) -> dict[int, Place]:
    """{row of the batch: whose sequence it is}, of the kept trajectories of some groups.

    By their content: a recipe may put its batch together as it likes. What is not in the batch is left out.
    """
    ends_B = np.cumsum(batch.lengths_B)
    by_length: dict[int, list[int]] = defaultdict(list)
    for row, length in enumerate(batch.lengths_B.tolist()):
        by_length[length].append(row)
    found: dict[int, Place] = {}
    for group in numbers:
        for index in groups[group].kept:
            for number, part in enumerate(groups[group].trajectories[index].parts):
                length = len(part.token_ids_T)
                for row in by_length[length]:
                    span = slice(ends_B[row] - length, ends_B[row])
                    same = row not in found and np.array_equal(batch.token_ids_N[span], part.token_ids_T)
                    if same and np.array_equal(batch.logprobs_N[span], part.logprobs_T):
                        found[row] = Place(group, index, number)
                        break
    return dict(sorted(found.items()))


@dataclass(frozen=True, kw_only=True)
class StepRecords:
    """Makes the records of one step. epoch: when the clock of its times was 0, in seconds since 1970.

    whole: the groups whose tokens have numbers. explain: what the selector says, if it says anything. nodes: by lease,
    who made the group; epochs: those of their clocks. Runs in a thread: it only reads.
    """

    step: int
    groups: Sequence[Group]
    whole: Sequence[int]
    epoch: float
    nodes: Mapping[int, str] = field(default_factory=dict)
    epochs: Mapping[str, float] = field(default_factory=dict)
    explain: Explain | None = None

    def row(self, finished_at: float) -> StepRow:
        """finished_at: when its weights were live, on the clock of its times."""
        starts = [self._epoch_of(group) + member.started_at for group in self.groups for member in group.trajectories]
        return StepRow(
            step=self.step,
            started_at=min(starts, default=self.epoch + finished_at),
            finished_at=self.epoch + finished_at,
            groups=tuple(_row(group) for group in self.groups),
        )

    def records(self) -> list[GroupRecord]:
        return [self._group(number, group) for number, group in enumerate(self.groups)]

    def tokens(self, learner: Mapping[Place, LearnerNumbers]) -> list[GroupTokens]:
        """learner: what it says of the sequences of the whole groups."""
        return [
            GroupTokens(
                group=number,
                trajectories=tuple(
                    tuple(
                        self._sequence(Place(number, index, at), part, learner)
                        for at, part in enumerate(trajectory.parts)
                    )
                    for index, trajectory in enumerate(group.trajectories)
                ),
            )
            for number, group in enumerate(self.groups)
        ]

    def _epoch_of(self, group: Group) -> float:
        return self.epochs.get(self.nodes.get(group.lease, ""), self.epoch)

    def _group(self, number: int, group: Group) -> GroupRecord:
        advantages: dict[int, float] = {}
        if group.advantages_K is not None:
            advantages = dict(zip(group.kept, group.advantages_K.tolist(), strict=False))
        reasons = self.explain(group) if self.explain is not None else [{}] * len(group.trajectories)
        epoch = self._epoch_of(group)
        return GroupRecord(
            step=self.step,
            group=number,
            lease=group.lease,
            prompt_id=group.prompt.id,
            messages=tuple(dict(message) for message in group.prompt.messages),
            answer=group.prompt.answer,
            source=group.prompt.source,
            drop=group.drop,
            waste=dict(group.waste),
            refills=group.refills,
            node=self.nodes.get(group.lease, ""),
            whole=number in self.whole,
            trajectories=tuple(
                self._trajectory(member, index in group.kept, advantages.get(index), why, epoch)
                for index, (member, why) in enumerate(zip(group.trajectories, reasons, strict=True))
            ),
        )

    def _trajectory(
        self, member: Trajectory, kept: bool, advantage: float | None, reasons: Mapping[str, float], epoch: float
    ) -> TrajectoryRecord:
        error = member.error
        return TrajectoryRecord(
            sample=member.sample,
            seed=member.seed,
            temperature=member.temperature,
            stop=str(member.stop),
            error=None if error is None else (str(error.boundary), error.message),
            reward=member.reward,
            scores=dict(member.scores),
            answer=member.answer,
            kept=kept,
            advantage=advantage,
            reasons={name: float(value) for name, value in reasons.items()},
            prompt_tokens=_prompt_tokens(member),
            sampled_tokens=member.sampled_tokens,
            total_tokens=sum(len(part.token_ids_T) for part in member.parts),
            discarded_tokens=member.discarded_tokens,
            started_at=epoch + member.started_at,
            finished_at=epoch + member.finished_at,
            sequences=tuple(tuple(_turn(turn, epoch) for turn in part.turns) for part in member.parts),
        )

    def _sequence(
        self, place: Place, part: Trajectory | Segment, learner: Mapping[Place, LearnerNumbers]
    ) -> SequenceTokens:
        if place.group not in self.whole:
            return SequenceTokens(token_ids=part.token_ids_T, sampled=part.sampled_T)
        theirs = learner.get(place)
        return SequenceTokens(
            token_ids=part.token_ids_T,
            sampled=part.sampled_T,
            logprobs=part.logprobs_T,
            versions=part.versions_T,
            learner_logprobs=None if theirs is None else theirs.logprobs,
            entropy=None if theirs is None else theirs.entropy,
            push=None if theirs is None else theirs.push,
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


def _prompt_tokens(member: Trajectory) -> int:
    """Up to the first turn; all of them where there is none."""
    return member.turns[0].start if member.turns else len(member.token_ids_T)


def _turn(turn: Turn, epoch: float) -> TurnRecord:
    return TurnRecord(
        start=turn.start,
        end=turn.end,
        replica=turn.replica,
        cached_tokens=turn.cached_tokens,
        queued_at=epoch + turn.queued_at,
        started_at=epoch + turn.started_at,
        finished_at=epoch + turn.finished_at,
        truncated=turn.truncated,
        calls=tuple(_call(use, epoch) for use in turn.tool_uses),
        placed=tuple(
            Placed(
                at=epoch + place.at,
                replica=place.replica,
                rule=place.rule,
                headroom_blocks=place.headroom_blocks,
                stay_s=place.stay_s,
                go_s=place.go_s,
                free_blocks=dict(place.free_blocks),
            )
            for place in turn.placed
        ),
    )


def _call(use: ToolUse, epoch: float) -> Call:
    return Call(
        name=use.name,
        arguments=use.arguments,
        outcome=use.outcome,
        reply=use.response,
        closed_at=epoch + use.closed_at,
        dispatched_at=epoch + use.dispatched_at,
        finished_at=epoch + use.finished_at,
        overlap_s=use.overlap_s,
        executed=use.executed,
        jailed=use.jailed,
    )
