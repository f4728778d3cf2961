"""Answers which rollouts are under way, and which have just ended."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from engine.recording.in_flight import NotReadable, read
from engine.telemetry.in_flight import RolloutEnded, RolloutUnderWay, Snapshot
from engine.view.answers.trajectories import NotThere
from engine.view.run_files import RunFiles


def in_flight_of(run: RunFiles) -> dict[str, Any]:
    """Returns what the run wrote last. written: whether it wrote any. age_s: how long ago. now_at: the moment that it
    shows.

    Each rollout has the step (from 1) and the number of its group, both None in an evaluation. Raises NotThere.
    """
    try:
        snapshot = read(run.path)
    except NotReadable as error:
        raise NotThere(str(error)) from error
    if snapshot is None:  # no rollout has begun, or the run is of an older version
        snapshot = Snapshot(at=0.0, groups_per_step=1, counts={}, under_way=[], ended=[])
    size = max(1, snapshot.groups_per_step)
    return {
        "state": run.state,
        "written": snapshot.at > 0,
        "age_s": max(0.0, time.time() - snapshot.at),
        "now_at": snapshot.at,
        "elsewhere": run.config.get("nodes") is not None,
        "counts": snapshot.counts,
        "under_way": [_placed(rollout, size) for rollout in snapshot.under_way],
        "ended": [_placed(rollout, size) for rollout in snapshot.ended],
    }


def _placed(rollout: RolloutUnderWay | RolloutEnded, size: int) -> dict[str, Any]:
    fields = msgspec.to_builtins(rollout)
    lease = fields.pop("lease")
    step, group = (None, None) if lease < 0 else (lease // size + 1, lease % size)
    return {**fields, "step": step, "group": group}
