"""The journal of one granted group. It keeps the known records in memory, and passes new ones on to the lead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from engine.run.journal import Journal
from engine.run.journal_records import Decided, Ended, Grown, Piece, Record
from engine.types import Group, Segment, Trajectory

_ROUNDED = 1e-3  # rounding makes a log-probability positive by less than this
_MOST = 2**31  # numbers of samples and tokens are below it, because arrays hold them as int32


class NotOfAGroup(ValueError):
    """A record cannot follow those that are held; the message says why."""


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
        """Raises NotOfAGroup unless the record can follow those that are held.

        Only its shape is checked: a node with a key is trusted about what was sampled there.
        """
        match record:
            case Grown():
                _check_count("sample", record.sample)
                _check_tokens(record.piece)
                held = self.log(record.lease, record.attempt, record.sample).pieces
                _check_routes(record.piece, held)
            case Ended():
                _check_count("sample", record.sample)
                _check_trajectory(record.trajectory, record.sample)
                held = self.log(record.lease, record.attempt, record.sample).pieces
                _check_teacher(record.trajectory, sum(len(piece.token_ids_T) for piece in held))
                _check_routes(record.trajectory, held)
                for segment in record.trajectory.segments:
                    _check_routes(segment, [])
            case Decided():
                ended = {sample for sample in record.members if self._has_ended(record, sample)}
                if len(ended) < len(record.members):
                    raise NotOfAGroup(f"the decision names {record.members}, of which only {sorted(ended)} have ended")

    def _has_ended(self, record: Decided, sample: int) -> bool:
        return self.log(record.lease, record.attempt, sample).finished is not None


def group_of(records: Iterable[Record]) -> Group:
    """Returns the group that these records have made; the last one is the decision."""
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


def _check_teacher(trajectory: Trajectory, held: int) -> None:
    """held: the tokens of earlier records; the teacher's scores are all in this one."""
    for part, before in zip(trajectory.parts, (held, *[0] * len(trajectory.segments)), strict=True):
        tokens = before + len(part.token_ids_T)
        if part.teacher is not None and len(part.teacher.logprobs_T) != tokens:
            raise NotOfAGroup(f"a sequence of {tokens} tokens has {len(part.teacher.logprobs_T)} scores of a teacher")


def _check_routes(part: Piece | Trajectory | Segment, held: Sequence[Piece]) -> None:
    """held: the sequence's earlier pieces."""
    sequence = [*held, part]
    routes = [each.routes for each in sequence if each.routes is not None]
    tokens, routed = sum(len(each.token_ids_T) for each in sequence), sum(map(len, routes))
    if routed > tokens:
        raise NotOfAGroup(f"a sequence of {tokens} tokens has {routed} routes")
    if len(shapes := {(each.layers, each.per_token, each.wide) for each in routes}) > 1:
        raise NotOfAGroup(f"the routes of a sequence have several shapes: {sorted(shapes)}")


def _check_tokens(part: Piece | Trajectory | Segment) -> None:
    lengths = {len(part.token_ids_T), len(part.sampled_T), len(part.logprobs_T), len(part.versions_T)}
    if len(lengths) > 1:
        raise NotOfAGroup(f"its arrays have {sorted(lengths)} tokens, and should have equally many")
    if np.any(part.token_ids_T < 0):
        raise NotOfAGroup(f"a token id is {part.token_ids_T.min()}")
    if not np.all(part.logprobs_T < _ROUNDED):  # nan fails this too
        raise NotOfAGroup(f"a log-probability is {part.logprobs_T.max()}")
    for turn in part.turns:
        _check_count("start of a turn", turn.start)
        _check_count("end of a turn", turn.end)


def _check_count(name: str, value: int) -> None:
    if not 0 <= value < _MOST:
        raise NotOfAGroup(f"the {name} is {value}")
