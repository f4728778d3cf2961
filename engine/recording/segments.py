"""Makes a segment for the disk of the timeline's events."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from engine.recording.records import EngineSteps, Segment
from engine.telemetry.timeline import Events, StepBucket


def segment_of(events: Events, *, step: int, node: str = "") -> Segment:
    """Returns the segment. It runs in a thread, so it only reads the events."""
    return Segment(
        step=step,
        node=node,
        start=events.start,
        end=events.end,
        spans=tuple(events.spans),
        instants=tuple(events.instants),
        idle=tuple(events.intervals),
        engine_steps=tuple(_engine_steps(events.steps)),
        lags=tuple(events.lags),
    )


def _engine_steps(buckets: list[StepBucket]) -> list[EngineSteps]:
    """Returns the engine steps of each replica as columns, which are smaller than rows."""
    by_replica: dict[int, list[StepBucket]] = defaultdict(list)
    for bucket in buckets:
        by_replica[bucket.replica].append(bucket)
    counts = ("used_blocks", "running", "waiting", "preempted", "prefilled", "steps")
    return [
        EngineSteps(
            replica=replica,
            at=np.asarray([bucket.at for bucket in theirs]),
            **{name: np.asarray([getattr(bucket, name) for bucket in theirs], np.int32) for name in counts},
        )
        for replica, theirs in sorted(by_replica.items())
    ]
