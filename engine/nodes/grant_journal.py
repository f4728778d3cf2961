"""The journal of one granted group: what is known of it, in memory; what is new goes to the lead's journal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from engine.run.journal import Journal
from engine.run.journal_records import Decided, Ended, Grown, Piece, Record
from engine.types import Group, Segment, Trajectory

_ROUNDED = 1e-3  # a log-probability is not positive, but for rounding
_MOST = 2**31  # of whatever counts samples or tokens: arrays have them as int32


class NotOfAGroup(ValueError):
    """A record that cannot follow those that are there; the message says why."""


class GrantJournal(Journal):
    """records: the group's prompt (Drawn), and what the journal of the run holds of its trajectories.

    written: called with each new record.
    """

    def __init__(self, records: Iterable[Record], written: Callable[[Record], None] = lambda record: None) -> None:
        super().__init__()
        self._written = written
        for record in records:
            self.take(record)

    @property
    def on(self) -> bool:
        return True

    def write(self, record: Record) -> None:
        self._written(record)

    def check(self, record: Record) -> None:
        """Raises NotOfAGroup unless it can follow what is held. Only its shape is looked at: who has the key of a node
        is believed what was sampled there.
        """
        match record:
            case Grown():
                _check_count("sample", record.sample)
                _check_tokens(record.piece)
            case Ended():
                _check_count("sample", record.sample)
                _check_trajectory(record.trajectory, record.sample)
            case Decided():
                ended = {sample for sample in record.members if self._has_ended(record, sample)}
                if len(ended) < len(record.members):
                    raise NotOfAGroup(f"a decision for members {record.members}, of which {sorted(ended)} have ended")

    def _has_ended(self, record: Decided, sample: int) -> bool:
        return self.log(record.lease, record.attempt, sample).finished is not None


def group_of(records: Iterable[Record]) -> Group:
    """The group that these records, of which the last one is the decision, have made."""
    *_, decided = records = list(records)
    assert isinstance(decided, Decided), decided
    group = GrantJournal(records).decided(decided.lease, decided.attempt)
    assert group is not None
    return group


def _check_trajectory(trajectory: Trajectory, sample: int) -> None:
    if trajectory.sample != sample:
        raise NotOfAGroup(f"the end of sample {sample} has the trajectory of sample {trajectory.sample}")
    if trajectory.reward is not None and not math.isfinite(trajectory.reward):
        raise NotOfAGroup(f"the reward of sample {sample} is {trajectory.reward}")
    for part in trajectory.parts:
        _check_tokens(part)


def _check_tokens(part: Piece | Trajectory | Segment) -> None:
    lengths = {len(part.token_ids_T), len(part.sampled_T), len(part.logprobs_T), len(part.versions_T)}
    if len(lengths) > 1:
        raise NotOfAGroup(f"arrays of {sorted(lengths)} tokens, which should be as many")
    if np.any(part.token_ids_T < 0):
        raise NotOfAGroup(f"a token {part.token_ids_T.min()}")
    if not np.all(part.logprobs_T < _ROUNDED):  # nan is not either
        raise NotOfAGroup(f"a log-probability {part.logprobs_T.max()}")
    for turn in part.turns:
        _check_count("start of a turn", turn.start)
        _check_count("end of a turn", turn.end)


def _check_count(name: str, value: int) -> None:
    if not 0 <= value < _MOST:
        raise NotOfAGroup(f"{name} {value}")
