"""Batches in a row that hold nothing to train: either the run has learnt what it can, or it is broken.

Invariants
- One batch with something to train restarts the count.
- The run succeeds only if the groups are flat because they are solved. Any other cause is an error that names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from engine import metric_names as metric
from engine.telemetry.metrics import solved
from engine.types import Group, Trajectory

EMPTY_BATCHES = 10  # so many steps without anything to learn from are no accident
UNGRADED_STEPS = 3  # a run with so many ungraded steps at its end has failed
SOLVED_SHARE = 0.9  # share of the groups; the others may be prompts that nobody can solve (a wrong answer, say)


class NothingToTrain(RuntimeError):
    """Batch after batch was empty or ungraded, and not because the task is solved. The message gives the cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NothingLeft:
    """The end of a run that has learnt all it can.

    step: the last trained one. solved, groups: how many groups of the last `batches` batches were solved, of how many.
    """

    step: int
    batches: int
    solved: int
    groups: int

    def __str__(self) -> str:
        groups = f"{self.solved} of {self.groups} groups in {self.batches} batches in a row were solved"
        return f"nothing left to learn after step {self.step}: {groups}"


def check_graded(rows: Sequence[Mapping[str, float]]) -> None:
    """Checks a run that has ended. rows: its metrics. Raises NothingToTrain if no recent step was graded, or none ever.

    >>> check_graded([{"reward": 0.0}, {}, {"reward": 0.5}])
    """
    ungraded = len(list(takewhile(lambda row: metric.REWARD not in row, reversed(rows))))
    if ungraded and ungraded >= min(len(rows), UNGRADED_STEPS):
        raise NothingToTrain(
            f"nothing could be graded in the last {ungraded} of {len(rows)} steps. Fix: remove the cause, which "
            "notes.log names, and start anew with fresh=true"
        )


class EmptyBatches:
    """Counts the empty batches of a run. full_reward: a trajectory with this reward or more has solved its prompt.

    >>> from engine.types import Prompt
    >>> failed = Group(prompt=Prompt(id="0", messages=(), answer=""), trajectories=(), lease=0, drop="error")
    >>> watched = EmptyBatches(full_reward=1.0)
    >>> [watched.saw(step, [failed]) for step in range(1, 4)]  # the tenth raises NothingToTrain
    [None, None, None]
    """

    def __init__(self, full_reward: float) -> None:
        self._full_reward = full_reward
        self._empty: list[Sequence[Group]] = []

    def saw(self, step: int, groups: Sequence[Group]) -> NothingLeft | None:
        """Takes the batch of a step. Returns how the run ended if it has, and raises NothingToTrain if it is broken."""
        if any(group.kept for group in groups):
            self._empty.clear()
            return None
        self._empty.append(groups)
        if len(self._empty) < EMPTY_BATCHES:
            return None
        seen = [group for batch in self._empty for group in batch]
        count = sum(solved(group, self._full_reward) for group in seen)
        if count >= SOLVED_SHARE * len(seen):
            return NothingLeft(step=step - 1, batches=EMPTY_BATCHES, solved=count, groups=len(seen))
        cause = _cause(seen, self._full_reward)
        raise NothingToTrain(f"step {step}: {EMPTY_BATCHES} batches in a row held nothing to train on: {cause}")


def _cause(groups: Sequence[Group], full_reward: float) -> str:
    """Returns what the groups were, and what to do."""
    members = [member for group in groups for member in group.trajectories]
    counts = Counter(_kind(group, full_reward) for group in groups)
    summary = f"of {len(groups)} groups {', '.join(f'{count} {kind}' for kind, count in counts.most_common())}"
    if errors := [member.error for member in members if member.error is not None]:
        summary += f"; the first error: {errors[0].boundary}: {errors[0].message}"
    if members and not any(member.sampled_tokens for member in members):
        return (
            f"{summary}; no token was sampled. Fix: a larger max_tokens, if the prompts fill it, or what the error says"
        )
    advice = "easier prompts, more samples per group, or a reward that tells the attempts at a prompt apart"
    return f"{summary}. Fix: {advice}"


def _kind(group: Group, full_reward: float) -> str:
    if solved(group, full_reward):
        return "solved"
    if group.drop == "flat":
        return f"flat at reward {_reward(group.trajectories):g}"
    return "failed" if group.drop == "error" else f"dropped ({group.drop})"


def _reward(members: Sequence[Trajectory]) -> float:
    return float(np.median([member.reward for member in members if member.reward is not None] or [0.0]))
