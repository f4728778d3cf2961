"""Grades a trajectory or a group within a deadline. What was our fault never gets a reward of 0.

Invariants
- A reward answers with a finite number or a Grade for each trajectory; another answer raises WrongPart, which names the
  reward, its file and line, the prompt and the sample.
- An exception in a reward ends the run, with a note of what it graded; only GraderUnavailable and the deadline do not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from engine.errors import add_note, no_foreign_cancel
from engine.ports import Grade, GraderUnavailable, GroupReward, Reward
from engine.telemetry.timeline import Timeline
from engine.types import Boundary, RolloutError, StopReason, Trajectory
from engine.user_parts import WrongPart, call, number, place_of

GRADE_DEADLINE_S = 30.0
_FIX = "Fix: return a number, or raise GraderUnavailable"
_FIX_GROUP = "Fix: return a list with a number for each trajectory, None for one that could not be graded"


async def graded(
    trajectory: Trajectory, reward: Reward, timeline: Timeline, deadline_s: float = GRADE_DEADLINE_S
) -> Trajectory:
    """Returns the trajectory with its reward, or with a typed error if it could not be graded. Raises WrongPart."""
    if trajectory.error is not None:
        return trajectory
    answer = await _answer(
        partial(call, "reward", reward, trajectory),
        lambda: f"in the reward {place_of(reward)}, for {trajectory.prompt.id}, sample {trajectory.sample}",
        timeline=timeline,
        deadline_s=deadline_s,
        prompt_id=trajectory.prompt.id,
        sample=trajectory.sample,
    )
    return _ungraded(trajectory, answer) if isinstance(answer, RolloutError) else _graded(trajectory, answer, reward)


async def graded_together(
    trajectories: Sequence[Trajectory],
    reward: GroupReward,
    timeline: Timeline,
    deadline_s: float = GRADE_DEADLINE_S,
) -> tuple[Trajectory, ...]:
    """Returns the trajectories of a prompt with their rewards, or with a typed error if they could not be graded.

    Those that have failed already are passed through, and the reward does not see them. Raises WrongPart if it does not
    give one grade for each of the others.
    """
    usable = [index for index, member in enumerate(trajectories) if member.error is None]
    done = list(trajectories)
    if not usable:
        return tuple(done)
    asked = tuple(trajectories[index] for index in usable)  # a reward that sorted a list would mix up the grades
    prompt_id = asked[0].prompt.id
    answer = await _answer(
        partial(call, "reward", reward, asked),
        lambda: f"in the reward {place_of(reward)}, for the group of {prompt_id}",
        timeline=timeline,
        deadline_s=deadline_s,
        prompt_id=prompt_id,
        samples=len(asked),
    )
    for index, member, grade in zip(usable, asked, _grades(answer, asked, reward), strict=True):
        if grade is None:
            grade = _error("the reward of its group gave this trajectory no grade")
        done[index] = _ungraded(member, grade) if isinstance(grade, RolloutError) else _graded(member, grade, reward)
    return tuple(done)


def _grades(answer: Any, asked: Sequence[Trajectory], reward: GroupReward) -> list[Any]:
    """Returns a grade for each trajectory, or the error for which there is none. Raises WrongPart."""
    if isinstance(answer, RolloutError):
        return [answer] * len(asked)
    subject = f"the reward {place_of(reward)} of the group of {asked[0].prompt.id}"
    try:
        if isinstance(answer, str | bytes | dict | set):
            raise TypeError
        grades = list(answer)
    except TypeError:
        raise WrongPart(f"{subject} answered {answer!r:.100}. {_FIX_GROUP}") from None
    except Exception as failure:  # the answer is a generator, which raised it
        add_note(failure, f"in {subject}")
        raise
    if len(grades) != len(asked):
        raise WrongPart(f"{subject} gave {len(grades)} grades for {len(asked)} trajectories. {_FIX_GROUP}")
    return grades


async def _answer(
    ask: Callable[[], Awaitable[Any]],
    where: Callable[[], str],
    *,
    timeline: Timeline,
    deadline_s: float,
    prompt_id: str,
    **labels: int,
) -> Any:
    """Returns the reward's answer, or a RolloutError if it gave none. where: makes the note that its exceptions get."""
    started = timeline.now()
    lane = timeline.lanes["reward"].take()
    try:
        async with asyncio.timeout(deadline_s) as budget:
            with timeline.idle_cause("reward"), no_foreign_cancel("the reward"):
                return await ask()
    except (GraderUnavailable, TimeoutError) as failure:
        if isinstance(failure, TimeoutError) and not budget.expired():
            add_note(failure, where())
            raise  # a bug in the reward, not our deadline
        return _error(str(failure) or _no_reason(failure, deadline_s))
    except WrongPart:
        raise
    except Exception as failure:
        add_note(failure, where())
        raise
    finally:
        timeline.span("reward", prompt_id, started, timeline.now(), lane, **labels)
        timeline.lanes["reward"].give(lane)


def _error(message: str) -> RolloutError:
    return RolloutError(boundary=Boundary.REWARD, message=message)


def _ungraded(trajectory: Trajectory, error: RolloutError) -> Trajectory:
    return replace(trajectory, error=error, stop=StopReason.ERROR, reward=None, scores={})


def _no_reason(failure: Exception, deadline_s: float) -> str:
    return f"no grade within {deadline_s:g} s" if isinstance(failure, TimeoutError) else "GraderUnavailable"


def _graded(trajectory: Trajectory, answer: Any, reward: Reward | GroupReward) -> Trajectory:
    """Returns the trajectory with its grade as plain numbers, since a journal holds no others. Raises WrongPart."""

    def checked(value: Any, what: str = "") -> float:
        try:
            return number(value)
        except ValueError:
            raise wrong(f"{what}{value!r:.100}") from None

    def wrong(shown: str) -> WrongPart:
        sample = f"{trajectory.prompt.id}, sample {trajectory.sample}"
        return WrongPart(f"the reward {place_of(reward)} answered {shown} for {sample}. {_FIX}")

    grade = answer if isinstance(answer, Grade) else Grade(reward=answer)
    value = checked(grade.reward)
    if not isinstance(grade.scores, Mapping):
        raise wrong(f"scores={grade.scores!r:.100}")
    scores = {
        str(name): None if score is None else checked(score, f"a score {name!r} of ")
        for name, score in grade.scores.items()
    }
    return replace(trajectory, reward=value, scores=scores)
