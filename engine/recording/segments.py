"""From the timeline's events to a segment on the disk."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from engine.recording.records import EngineSteps, Idle, Instant, Lag, Segment, Span
from engine.telemetry.timeline import Events, StepBucket


def segment_of(events: Events, *, step: int, node: str = "") -> Segment:
    """Its times are those of the day. Runs in a thread: it only reads the events."""
    epoch = events.epoch
    return Segment(
        step=step,
        node=node,
        start=epoch + events.start,
        end=epoch + events.end,
        spans=tuple(
            Span(
                track=span.track,
                lane=span.lane,
                name=span.name,
                start=epoch + span.start,
                end=epoch + span.end,
                args=span.args,
            )
            for span in events.spans
        ),
        instants=tuple(
            Instant(track=event.track, at=epoch + event.at, name=event.name, args=event.args)
            for event in events.instants
        ),
        idle=tuple(
            Idle(replica=each.replica, cause=each.cause, start=epoch + each.start, end=epoch + each.end)
            for each in events.intervals
        ),
        engine_steps=tuple(_engine_steps(events.steps, epoch)),
        lags=tuple(Lag(at=epoch + lag.at, lag_s=lag.lag_s) for lag in events.lags),
    )


def _engine_steps(buckets: list[StepBucket], epoch: float) -> list[EngineSteps]:
    of: dict[int, list[StepBucket]] = defaultdict(list)
    for bucket in buckets:
        of[bucket.replica].append(bucket)
    counts = ("used_blocks", "running", "waiting", "preempted", "prefilled", "steps")
    return [
        EngineSteps(
            replica=replica,
            at=epoch + np.asarray([bucket.at for bucket in theirs]),
            **{name: np.asarray([getattr(bucket, name) for bucket in theirs], np.int32) for name in counts},
        )
        for replica, theirs in sorted(of.items())
    ]
