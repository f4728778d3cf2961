"""The grade of a trajectory or of a group: within a deadline, and never a 0 for what was our fault."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from engine.errors import no_foreign_cancel
from engine.ports import Grade, GraderUnavailable, GroupReward, Reward
from engine.telemetry.timeline import Timeline
from engine.types import Boundary, RolloutError, StopReason, Trajectory

GRADE_DEADLINE_S = 30.0

Answer = TypeVar("Answer")


async def graded(
    trajectory: Trajectory, reward: Reward, timeline: Timeline, deadline_s: float = GRADE_DEADLINE_S
) -> Trajectory:
    """The trajectory with its reward, or with a typed error when it could not be graded."""
    if trajectory.error is not None:
        return trajectory
    found = await _answer(
        partial(reward, trajectory),
        timeline=timeline,
        deadline_s=deadline_s,
        prompt_id=trajectory.prompt.id,
        sample=trajectory.sample,
    )
    return _ungraded(trajectory, found) if isinstance(found, RolloutError) else _graded(trajectory, found)


async def graded_together(
    trajectories: Sequence[Trajectory],
    reward: GroupReward,
    timeline: Timeline,
    deadline_s: float = GRADE_DEADLINE_S,
) -> tuple[Trajectory, ...]:
    """The trajectories of a prompt with their rewards, or with a typed error where they could not be graded.

    Those that have failed already are passed through, and the reward does not see them. Raises ValueError when it
    does not give one grade for each of the others.
    """
    usable = [index for index, member in enumerate(trajectories) if member.error is None]
    done = list(trajectories)
    if not usable:
        return tuple(done)
    asked = [trajectories[index] for index in usable]
    found = await _answer(
        partial(reward, asked),
        timeline=timeline,
        deadline_s=deadline_s,
        prompt_id=asked[0].prompt.id,
        samples=len(asked),
    )
    grades: Sequence[float | Grade | RolloutError | None]
    grades = [found] * len(asked) if isinstance(found, RolloutError) else found
    if len(grades) != len(asked):
        raise ValueError(
            f"the reward of the group of {asked[0].prompt.id} gave {len(grades)} grades for {len(asked)} trajectories"
        )
    for index, member, grade in zip(usable, asked, grades, strict=True):
        if grade is None:
            grade = _error("the reward of its group gave this trajectory no grade")
        done[index] = _ungraded(member, grade) if isinstance(grade, RolloutError) else _graded(member, grade)
    return tuple(done)


async def _answer(
    ask: Callable[[], Awaitable[Answer]], *, timeline: Timeline, deadline_s: float, prompt_id: str, **noted: int
) -> Answer | RolloutError:
    """What the reward answers, or why it did not."""
    started = timeline.now()
    lane = timeline.lanes["reward"].take()
    try:
        async with asyncio.timeout(deadline_s) as budget:
            with timeline.idle_cause("reward"), no_foreign_cancel("the reward"):
                return await ask()
    except (GraderUnavailable, TimeoutError) as failure:
        if isinstance(failure, TimeoutError) and not budget.expired():
            raise  # a bug in the reward, not our deadline
        return _error(str(failure) or f"no grade within {deadline_s} s")
    finally:
        timeline.span("reward", prompt_id, started, timeline.now(), lane, **noted)
        timeline.lanes["reward"].give(lane)


def _error(message: str) -> RolloutError:
    return RolloutError(boundary=Boundary.REWARD, message=message)


def _ungraded(trajectory: Trajectory, error: RolloutError) -> Trajectory:
    return replace(trajectory, error=error, stop=StopReason.ERROR, reward=None, scores={})


def _graded(trajectory: Trajectory, found: float | Grade) -> Trajectory:
    """Plain numbers, whatever a reward calculates with: a journal holds no others."""
    grade = Grade.of(found)
    reward = float(grade.reward)
    scores = {str(name): None if score is None else float(score) for name, score in grade.scores.items()}
    for name, value in (("reward", reward), *((f"score {name!r}", score) for name, score in scores.items())):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"the {name} of {trajectory.prompt.id}, sample {trajectory.sample} is {value}")
    return replace(trajectory, reward=reward, scores=scores)
