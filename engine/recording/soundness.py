"""Whether a record that can be decoded is one that this engine writes.

Invariant: whoever reads a sound record can follow its numbers (turns within tokens, columns of one length, known
tracks) without looking at them again. Anything else is damaged, or was made by somebody else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from engine.recording.records import (
    EngineSteps,
    GroupRecord,
    GroupTokens,
    Instant,
    Record,
    Segment,
    SequenceTokens,
    Span,
    StepRow,
    TrajectoryRecord,
)
from engine.telemetry.timeline import TRACKS
from engine.types import Boundary, StopReason

STOPS, BOUNDARIES = frozenset(StopReason), frozenset(Boundary)
PLAIN = (str, int, float, bool, type(None))
LATEST_S = 4e9  # 2096 on the wall clock; 8e15 microseconds are below 2**53
COLUMNS = ("at", "used_blocks", "running", "waiting", "preempted", "prefilled", "steps")


def is_sound(record: Record) -> bool:
    match record:
        case StepRow():
            return all(set(row.kept) <= set(range(len(row.rewards))) for row in record.groups)
        case GroupRecord():
            asked = all({"role", "content"} <= message.keys() for message in record.messages)
            return asked and all(map(_is_trajectory, record.trajectories))
        case GroupTokens():
            return all(sequences and all(map(_is_sequence, sequences)) for sequences in record.trajectories)
        case Segment():
            return _is_segment(record)


def belong(group: GroupRecord, tokens: GroupTokens) -> bool:
    """Whether these are the tokens of this group, so that each turn lies within its sequence."""
    if tokens.group != group.group or len(tokens.trajectories) != len(group.trajectories):
        return False
    for member, sequences in zip(group.trajectories, tokens.trajectories, strict=True):
        if len(sequences) < len(member.sequences):
            return False
        for turns, held in zip(member.sequences, sequences, strict=False):
            if any(turn.end > len(held.token_ids) for turn in turns):
                return False
        if group.whole and any(held.logprobs is None or held.versions is None for held in sequences):
            return False
    return True


def _is_trajectory(member: TrajectoryRecord) -> bool:
    turns = [turn for turns in member.sequences for turn in turns]
    times = [member.started_at, member.finished_at]
    times += [at for turn in turns for at in (turn.queued_at, turn.started_at, turn.finished_at)]
    times += [
        at for turn in turns for call in turn.calls for at in (call.closed_at, call.dispatched_at, call.finished_at)
    ]
    times += [placed.at for turn in turns for placed in turn.placed]
    return (
        bool(member.sequences)
        and member.stop in STOPS
        and (member.error is None or member.error[0] in BOUNDARIES)
        and all(0 <= turn.start <= turn.end for turn in turns)
        and _are_times(times)
    )


def _is_sequence(tokens: SequenceTokens) -> bool:
    columns = [getattr(tokens, name) for name in tokens.__struct_fields__]
    size = len(tokens.token_ids)
    return all(column is None or len(column) == size for column in columns) and not (tokens.token_ids < 0).any()


def _is_segment(segment: Segment) -> bool:
    times = [segment.start, segment.end]
    times += [at for span in segment.spans for at in (span.start, span.end)]
    times += [instant.at for instant in segment.instants]
    times += [at for stretch in segment.idle for at in (stretch.start, stretch.end)]
    times += [at for lag in segment.lags for at in (lag.at, lag.lag_s)]
    events: tuple[Span | Instant, ...] = (*segment.spans, *segment.instants)
    return (
        all(event.track in TRACKS and _can_be_shown(event.args) for event in events)
        and all(map(_are_columns, segment.engine_steps))
        and _are_times(times)
    )


def _are_columns(steps: EngineSteps) -> bool:
    return len({len(getattr(steps, name)) for name in COLUMNS}) == 1 and _are_times(steps.at.tolist())


def _are_times(seconds: Iterable[float]) -> bool:
    """Whether whole microseconds of each, and of the difference of any two, are exact numbers for JavaScript too."""
    return all(abs(each) <= LATEST_S for each in seconds)


def _can_be_shown(args: dict[str, Any]) -> bool:
    """As JSON; `key` names a trajectory."""
    if not isinstance(args.get("key", ""), str | int):
        return False
    if all(type(value) in PLAIN for value in args.values()):
        return True
    try:
        msgspec.json.encode(args)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
