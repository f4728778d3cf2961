"""Reads a recorded timeline as columns, as the page draws it: in a third of the time that whole segments take.

Instant events are left out. A segment that is not sound is left out, as `RecordedRun.timeline` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.encoding import decoder, frames
from engine.recording import files
from engine.recording.records import Doubles, EngineSteps
from engine.recording.soundness import are_columns, are_times, can_be_shown
from engine.telemetry.idle_clock import Interval
from engine.telemetry.timeline import TRACKS, LagEvent

STEPS = 2  # timelines that are kept in memory: one with 400,000 spans takes 90 MB
Numbers = NDArray[np.int64]


class _Span(msgspec.Struct, array_like=True, gc=False):
    """The fields of `engine.telemetry.timeline.SpanEvent`."""

    track: str
    lane: int
    name: str
    start: float
    end: float
    args: msgspec.Raw


class _Segment(msgspec.Struct, tag="Segment"):
    step: int
    node: str
    start: float
    end: float
    spans: tuple[_Span, ...] = ()
    idle: tuple[Interval, ...] = ()
    engine_steps: tuple[EngineSteps, ...] = ()
    lags: tuple[LagEvent, ...] = ()


class _Key(msgspec.Struct, gc=False):
    key: str | int | None = None


_key_decoder = msgspec.msgpack.Decoder(_Key)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanColumns:
    """The spans of one track of one node, in the order in which they ended. names: by the numbers in name_S.

    Shape legend: S spans.
    """

    node: str
    track: str
    lane_S: Numbers
    name_S: Numbers
    start_S: Doubles
    end_S: Doubles
    names: tuple[str, ...]
    raw_args_S: Sequence[msgspec.Raw]

    def key(self, span: int) -> str | int | None:
        """Returns the key of the trajectory to which a span belongs, if it has one."""
        try:
            return _key_decoder.decode(self.raw_args_S[span]).key
        except (ValueError, TypeError, RecursionError):
            return None

    def args(self, span: int) -> dict[str, Any]:
        """Returns the args of a span by its number; {} if they cannot be shown."""
        try:
            args = msgspec.msgpack.decode(self.raw_args_S[span], type=dict[str, Any])
        except (ValueError, TypeError, RecursionError):
            return {}
        return args if can_be_shown(args) else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineColumns:
    """The timeline of some steps. marks: (step, start, end) of each."""

    marks: tuple[tuple[int, float, float], ...]
    spans: tuple[SpanColumns, ...]
    idle: tuple[tuple[str, Interval], ...]  # with the node of each
    engine_steps: tuple[tuple[str, EngineSteps], ...]
    lags: tuple[LagEvent, ...]

    @property
    def start(self) -> float:
        return min(start for _, start, _ in self.marks)

    @property
    def end(self) -> float:
        return max(end for _, _, end in self.marks)


_decoder: msgspec.msgpack.Decoder[_Segment] = decoder(_Segment)


def columns_of(folder: Path, first: int, last: int) -> TimelineColumns | None:
    """Returns the timeline of the steps from first to last, both included; None if nothing of it is there. The newest
    ones stay in memory. folder: that of the record.
    """
    versions = []
    for step in files.timeline_in(folder):
        if first <= step <= last and (version := _version(files.timeline_path(folder, step))):
            versions.append((step, version))
    return _columns(folder, tuple(versions)) if versions else None


def _version(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=STEPS)
def _columns(folder: Path, versions: tuple[tuple[int, tuple[int, ...]], ...]) -> TimelineColumns | None:
    segments = [segment for step, _ in versions for segment in _segments(folder, step)]
    if not segments:
        return None
    spans: dict[tuple[str, str], list[_Span]] = defaultdict(list)
    for segment in segments:
        for span in segment.spans:
            spans[segment.node, span.track].append(span)
    order = {track: number for number, track in enumerate(TRACKS)}
    keys = sorted(spans, key=lambda key: (key[0], order[key[1]]))
    return TimelineColumns(
        marks=tuple(_marks(segments)),
        spans=tuple(_span_columns(*key, spans[key]) for key in keys),
        idle=tuple((segment.node, stretch) for segment in segments for stretch in segment.idle),
        engine_steps=tuple((segment.node, steps) for segment in segments for steps in segment.engine_steps),
        lags=tuple(lag for segment in segments for lag in segment.lags),
    )


def _segments(folder: Path, step: int) -> Iterator[_Segment]:
    try:
        payloads, _ = frames(files.timeline_path(folder, step).read_bytes())
    except OSError:
        return
    for payload in payloads:
        try:
            segment = _decoder.decode(files.inflated(payload) or b"")
        except (ValueError, TypeError, RecursionError):  # msgspec lets through what is not its own
            continue
        if segment.step == step and _is_sound(segment):
            yield segment


def _is_sound(segment: _Segment) -> bool:
    times = [segment.start, segment.end]
    times += [span.start for span in segment.spans]
    times += [span.end for span in segment.spans]
    times += [at for stretch in segment.idle for at in (stretch.start, stretch.end)]
    times += [at for lag in segment.lags for at in (lag.at, lag.lag_s)]
    return (
        {span.track for span in segment.spans} <= set(TRACKS)
        and all(0 <= span.lane < 1 << 31 for span in segment.spans)
        and all(map(are_columns, segment.engine_steps))
        and are_times(times)
    )


def _span_columns(node: str, track: str, spans: Sequence[_Span]) -> SpanColumns:
    names = tuple(sorted({span.name for span in spans}))
    numbers = {name: number for number, name in enumerate(names)}
    return SpanColumns(
        node=node,
        track=track,
        lane_S=np.asarray([span.lane for span in spans], np.int64),
        name_S=np.asarray([numbers[span.name] for span in spans], np.int64),
        start_S=np.asarray([span.start for span in spans]),
        end_S=np.asarray([span.end for span in spans]),
        names=names,
        raw_args_S=[span.args for span in spans],
    )


def _marks(segments: Sequence[_Segment]) -> Iterator[tuple[int, float, float]]:
    by_step: dict[int, list[_Segment]] = defaultdict(list)
    for segment in segments:
        by_step[segment.step].append(segment)
    for step, own in sorted(by_step.items()):
        yield step, min(segment.start for segment in own), max(segment.end for segment in own)
