"""Decides whether a record that could be decoded is one that this engine writes.

Invariant: a reader of a sound record can follow its numbers (turns within tokens, columns of one length, known tracks)
without checking them. Any other record is damaged, or was made by somebody else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from engine.recording.records import EngineSteps, GroupTokens, PartTokens, Record, RecordedGroup, Segment, StepRow
from engine.telemetry.timeline import TRACKS, InstantEvent, SpanEvent
from engine.types import Trajectory

PLAIN = (str, int, float, bool, type(None))
LATEST_S = 4e9  # 2096 on the wall clock; 8e15 microseconds are below 2**53
COLUMNS = ("at", "used_blocks", "running", "waiting", "preempted", "prefilled", "steps")


def is_sound(record: Record) -> bool:
    match record:
        case StepRow():
            return all(set(row.kept) <= set(range(len(row.rewards))) for row in record.groups)
        case RecordedGroup():
            return _is_group(record)
        case GroupTokens():
            return all(parts and all(map(_are_tokens, parts)) for parts in record.trajectories)
        case Segment():
            return _is_segment(record)


def belong(recorded: RecordedGroup, tokens: GroupTokens) -> bool:
    """Returns whether these are the tokens of this group, so that each turn lies within its sequence."""
    members = recorded.group.trajectories
    if tokens.number != recorded.number or len(tokens.trajectories) != len(members):
        return False
    for member, parts in zip(members, tokens.trajectories, strict=True):
        if len(parts) != len(member.parts):
            return False
        for part, held in zip(member.parts, parts, strict=True):
            if any(turn.end > len(held.token_ids_T) for turn in part.turns):
                return False
        if recorded.whole and any(held.logprobs_T is None or held.versions_T is None for held in parts):
            return False
    return True


def _is_group(recorded: RecordedGroup) -> bool:
    group, count = recorded.group, len(recorded.group.trajectories)
    return (
        all({"role", "content"} <= message.keys() for message in group.prompt.messages)
        and len(recorded.reasons) == count
        and len(set(group.kept) & set(range(count))) == len(group.kept)
        and (group.advantages_K is None or len(group.advantages_K) == len(group.kept))
        and all(map(_is_trajectory, group.trajectories))
    )


def _is_trajectory(member: Trajectory) -> bool:
    turns = member.all_turns
    times = [member.started_at, member.finished_at]
    times += [at for turn in turns for at in (turn.queued_at, turn.started_at, turn.finished_at)]
    times += [at for use in member.tool_uses for at in (use.closed_at, use.dispatched_at, use.finished_at)]
    times += [placed.at for turn in turns for placed in turn.placed]
    return (
        all(0 <= turn.start <= turn.end for turn in turns)
        and not any(len(part.token_ids_T) for part in member.parts)
        and _are_times(times)
    )


def _are_tokens(tokens: PartTokens) -> bool:
    columns = [getattr(tokens, name) for name in tokens.__struct_fields__ if name.endswith("_T")]
    size = len(tokens.token_ids_T)
    return all(column is None or len(column) == size for column in columns) and not (tokens.token_ids_T < 0).any()


def _is_segment(segment: Segment) -> bool:
    times = [segment.start, segment.end]
    times += [at for span in segment.spans for at in (span.start, span.end)]
    times += [instant.at for instant in segment.instants]
    times += [at for stretch in segment.idle for at in (stretch.start, stretch.end)]
    times += [at for lag in segment.lags for at in (lag.at, lag.lag_s)]
    events: tuple[SpanEvent | InstantEvent, ...] = (*segment.spans, *segment.instants)
    return (
        all(event.track in TRACKS and _can_be_shown(event.args) for event in events)
        and all(map(_are_columns, segment.engine_steps))
        and _are_times(times)
    )


def _are_columns(steps: EngineSteps) -> bool:
    return len({len(getattr(steps, name)) for name in COLUMNS}) == 1 and _are_times(steps.at.tolist())


def _are_times(seconds: Iterable[float]) -> bool:
    """Returns whether whole microseconds of each, and of any difference, are exact numbers in JavaScript too."""
    return all(abs(each) <= LATEST_S for each in seconds)


def _can_be_shown(args: dict[str, Any]) -> bool:
    """Returns whether the args have a JSON; `key` names a trajectory."""
    if not isinstance(args.get("key", ""), str | int):
        return False
    if all(type(value) in PLAIN for value in args.values()):
        return True
    try:
        msgspec.json.encode(args)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
