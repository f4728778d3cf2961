"""Reads of a recorded step what the page counts and draws. It takes a fifth of the time that reading all of it takes.

Invariant: an outline has the names and values of `engine.types` and `engine.recording.records`, without texts, tokens
and the free blocks of placements. A group that is not sound is left out, as `RecordedRun.groups` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from engine.encoding import decoder
from engine.recording import files
from engine.recording.records import Doubles
from engine.recording.soundness import are_times

STEPS = 2  # steps that are kept in memory: one of 16,384 trajectories with 8 turns takes 100 MB


class CallOutline(msgspec.Struct, frozen=True, gc=False):
    name: str
    outcome: str
    dispatched_at: float
    finished_at: float
    executed: bool
    queue_s: float | None = None


class PlacedOutline(msgspec.Struct, frozen=True, gc=False):
    at: float
    replica: int
    rule: str
    headroom_blocks: float


class TurnOutline(msgspec.Struct, frozen=True, gc=False):
    start: int
    end: int
    replica: int
    cached_tokens: int
    queued_at: float
    started_at: float
    finished_at: float
    tool_uses: tuple[CallOutline, ...] = ()
    placed: tuple[PlacedOutline, ...] = ()

    @property
    def tokens(self) -> int:
        """How many tokens the turn sampled."""
        return self.end - self.start


class SegmentOutline(msgspec.Struct, frozen=True, gc=False):
    turns: tuple[TurnOutline, ...] = ()


class ErrorOutline(msgspec.Struct, frozen=True, gc=False):
    boundary: str
    message: str


class TrajectoryOutline(msgspec.Struct, frozen=True, gc=False):
    sample: int
    stop: str
    started_at: float
    finished_at: float
    turns: tuple[TurnOutline, ...] = ()
    segments: tuple[SegmentOutline, ...] = ()
    reward: float | None = None
    error: ErrorOutline | None = None

    @property
    def parts(self) -> tuple[tuple[TurnOutline, ...], ...]:
        """The turns of each of its token sequences, as `Trajectory.parts`."""
        return (self.turns, *(segment.turns for segment in self.segments))

    @property
    def all_turns(self) -> list[TurnOutline]:
        """The turns of all its token sequences, in the order of `Trajectory.all_turns`."""
        return [turn for turns in self.parts for turn in turns]

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turns in self.parts for turn in turns)

    @property
    def tool_uses(self) -> list[CallOutline]:
        return [use for turn in self.all_turns for use in turn.tool_uses]


class PromptOutline(msgspec.Struct, frozen=True, gc=False):
    id: str
    messages: tuple[dict[str, Any], ...] = ()

    @property
    def question(self) -> str:
        """Returns the last message."""
        return str(self.messages[-1].get("content", "")) if self.messages else ""


class GroupOutline(msgspec.Struct, frozen=True):
    prompt: PromptOutline
    trajectories: tuple[TrajectoryOutline, ...]
    kept: tuple[int, ...] = ()
    advantages_K: Doubles | None = None
    drop: str | None = None
    waste: dict[str, int] = {}
    refills: int = 0

    def advantage(self, index: int) -> float | None:
        """Returns what `Group.advantage` does."""
        if self.advantages_K is None or index not in self.kept:
            return None
        return float(self.advantages_K[self.kept.index(index)])


class RecordedOutline(msgspec.Struct, frozen=True, tag="RecordedGroup"):
    """The outline of a `RecordedGroup`."""

    step: int
    number: int
    group: GroupOutline
    reasons: tuple[dict[str, float], ...]
    node: str
    whole: bool


_decoder: msgspec.msgpack.Decoder[RecordedOutline] = decoder(RecordedOutline)


def outlines_of(folder: Path, step: int) -> Sequence[RecordedOutline]:
    """Returns the groups of a step in admission order; none if it is not kept whole. Those of the newest STEPS calls
    stay in memory. folder: that of the record.
    """
    path = files.step_path(folder, step)
    try:
        status = path.stat()
    except OSError:
        return ()
    return _outlines(path, step, (status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=STEPS)
def _outlines(path: Path, step: int, version: tuple[int, ...]) -> Sequence[RecordedOutline]:
    outlines = []
    for number, data in enumerate(files.read_data(path, 1, files.groups_in(path, step))):
        outline = _decoded(data)
        if outline is not None and (outline.step, outline.number) == (step, number):
            outlines.append(outline)
    return tuple(outlines)


def _decoded(data: bytes) -> RecordedOutline | None:
    try:
        outline = _decoder.decode(data)
    except (ValueError, TypeError, RecursionError):  # msgspec lets through what is not its own
        return None
    return outline if _is_sound(outline) else None


def _is_sound(outline: RecordedOutline) -> bool:
    group, count = outline.group, len(outline.group.trajectories)
    turns = [turn for member in group.trajectories for part in member.parts for turn in part]
    times = [at for member in group.trajectories for at in (member.started_at, member.finished_at)]
    times += [at for turn in turns for at in (turn.queued_at, turn.started_at, turn.finished_at)]
    times += [at for turn in turns for use in turn.tool_uses for at in (use.dispatched_at, use.finished_at)]
    times += [use.queue_s or 0.0 for turn in turns for use in turn.tool_uses]
    times += [placed.at for turn in turns for placed in turn.placed]
    return (
        len(outline.reasons) == count
        and len(set(group.kept) & set(range(count))) == len(group.kept)
        and (group.advantages_K is None or len(group.advantages_K) == len(group.kept))
        and all(0 <= turn.start <= turn.end for turn in turns)
        and are_times(times)
    )
