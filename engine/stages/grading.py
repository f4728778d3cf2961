"""The grade of one trajectory: within a deadline, and never a 0 for what was our fault."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

from engine.errors import no_foreign_cancel
from engine.ports import GraderUnavailable, Reward
from engine.telemetry.timeline import Timeline
from engine.types import Boundary, RolloutError, StopReason, Trajectory


async def graded(trajectory: Trajectory, reward: Reward, timeline: Timeline, deadline_s: float = 30.0) -> Trajectory:
    """The trajectory with its reward, or with a typed error when it could not be graded."""
    if trajectory.error is not None:
        return trajectory
    started = timeline.now()
    lane = timeline.lanes["reward"].take()
    try:
        async with asyncio.timeout(deadline_s) as budget:
            with timeline.idle_cause("reward"), no_foreign_cancel("the reward"):
                value = float(await reward(trajectory))  # a bool or a NumPy number: a journal holds plain ones
        if not math.isfinite(value):
            raise ValueError(f"the reward of {trajectory.prompt.id}, sample {trajectory.sample} is {value}")
        return replace(trajectory, reward=value)
    except (GraderUnavailable, TimeoutError) as failure:
        if isinstance(failure, TimeoutError) and not budget.expired():
            raise  # a bug in the reward, not our deadline
        error = RolloutError(boundary=Boundary.REWARD, message=str(failure) or f"no grade within {deadline_s} s")
        return replace(trajectory, error=error, stop=StopReason.ERROR)
    finally:
        timeline.span("reward", trajectory.prompt.id, started, timeline.now(), lane, sample=trajectory.sample)
        timeline.lanes["reward"].give(lane)
