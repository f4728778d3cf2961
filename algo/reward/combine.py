"""Rewards made of rewards: a weighted sum with monitors beside it, and one that the prompt chooses.

Invariants
- Each part is a score of the trajectory (`Grade.scores`) under its name; what the part itself reports is under
  `name/score`.
- A part of weight 0 is a monitor: it is only looked at. If it cannot grade, has a bug or takes too long, its score is
  None, and neither the reward nor its existence changes; its first bug is logged as a warning, which a run notes.
- If any other part cannot grade, there is no reward.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from engine.errors import BadInput, first_error, no_foreign_cancel
from engine.ports import Grade, GraderUnavailable, GroupReward, Reward
from engine.types import Trajectory
from engine.user_parts import call
from sandbox.require import positive, require

log = logging.getLogger(__name__)

Grades = Sequence[float | Grade | None]
Kind = TypeVar("Kind", Reward, GroupReward)


class EachAlone:
    """A GroupReward that grades each trajectory by itself, all at once."""

    sees_group: Literal[True] = True

    def __init__(self, reward: Reward) -> None:
        self.reward = reward

    async def __call__(self, trajectories: Sequence[Trajectory]) -> Grades:
        """Returns grades, None for a trajectory that could not be graded. Raises GraderUnavailable if none could be."""
        failures: list[GraderUnavailable] = []

        async def grade(trajectory: Trajectory) -> float | Grade | None:
            try:
                return await call("reward", self.reward, trajectory)
            except GraderUnavailable as failure:
                failures.append(failure)
                return None

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(grade(member), name=f"grade-{member.prompt.id}-{member.sample}")
                    for member in trajectories
                ]
        except BaseExceptionGroup as error:
            raise first_error(error) from error
        if failures and len(failures) == len(running):
            raise failures[0]
        return [task.result() for task in running]


class Weighted:
    """Adds up rewards, each times its weight; a reward of weight 0 is a monitor.

        reward = Weighted({"correct": (1.0, MathReward()), "style": (0.2, Judge(...)), "words": (0.0, Words())})

    monitor_s: seconds after which a monitor is given up. Raises ValueError for a weight that is not finite, for weights
    that are all 0, and for an empty name.
    """

    def __init__(self, parts: Mapping[str, tuple[float, Reward]], *, monitor_s: float = 10.0) -> None:
        for name, (_, part) in parts.items():
            if isinstance(part, GroupReward):
                raise ValueError(f"{name!r} grades whole groups. Fix: use WeightedGroup instead of Weighted")
        self._group = WeightedGroup(parts, monitor_s=monitor_s)

    async def __call__(self, trajectory: Trajectory) -> Grade:
        """Raises GraderUnavailable."""
        [grade] = await self._group([trajectory])
        if grade is None:  # for one trajectory there is a grade or a reason
            raise GraderUnavailable("a part of the reward gave no grade")
        return grade


class WeightedGroup:
    """Adds up rewards as `Weighted` does; any of them may see the whole group."""

    sees_group: Literal[True] = True

    def __init__(self, parts: Mapping[str, tuple[float, Reward | GroupReward]], *, monitor_s: float = 10.0) -> None:
        for name, (weight, _) in parts.items():
            if not name:
                raise ValueError("each part of a reward needs a name, got ''")
            if not math.isfinite(weight):
                raise ValueError(f"the weight of {name!r} must be finite, got {weight}")
        if not any(weight for weight, _ in parts.values()):
            raise ValueError(f"a reward needs a weight that is not 0, got {list(parts)} with 0 each")
        require("monitor_s", monitor_s, positive)
        self._weights = {name: weight for name, (weight, _) in parts.items()}
        self._rewards = {name: _of_group(reward) for name, (_, reward) in parts.items()}
        self._monitor_s = monitor_s
        self._broken: set[str] = set()  # the monitors of which a bug was logged

    async def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[Grade | None]:
        """Returns grades, None where a weighted part has none. Raises GraderUnavailable if one has none at all."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = {
                    name: tasks.create_task(self._part(name, trajectories), name=f"reward-{name}")
                    for name in self._rewards
                }
        except BaseExceptionGroup as error:
            raise first_error(error) from error
        parts = {name: task.result() for name, task in running.items()}
        return [
            self._sum({name: grades[index] for name, grades in parts.items()}) for index in range(len(trajectories))
        ]

    async def _part(self, name: str, trajectories: Sequence[Trajectory]) -> Sequence[Grade | None]:
        """Returns a part's grade of each trajectory."""
        if not self._weights[name]:
            return await self._monitored(name, trajectories)
        return self._checked(name, await call("reward", self._rewards[name], trajectories), trajectories)

    @staticmethod
    def _checked(name: str, grades: Grades, trajectories: Sequence[Trajectory]) -> Sequence[Grade | None]:
        if len(grades) != len(trajectories):
            raise ValueError(f"the reward {name!r} gave {len(grades)} grades for {len(trajectories)} trajectories")
        return [None if grade is None else Grade.of(grade) for grade in grades]

    async def _monitored(self, name: str, trajectories: Sequence[Trajectory]) -> Sequence[Grade | None]:
        """Returns a monitor's grades, all None if it could not grade, whatever the reason."""
        try:
            async with asyncio.timeout(self._monitor_s) as budget:
                with no_foreign_cancel("a monitor"):
                    grades = await call("reward", self._rewards[name], trajectories)
            return [_finite(grade) for grade in self._checked(name, grades, trajectories)]
        except GraderUnavailable:
            return [None] * len(trajectories)
        except Exception as error:
            late = isinstance(error, TimeoutError) and budget.expired()
            if not late and name not in self._broken:
                self._broken.add(name)
                log.warning(
                    "the monitor %r failed at %s: %s: %s. The run goes on, and score_missing/%s counts where it failed",
                    *(name, trajectories[0].prompt.id, type(error).__name__, error, name),
                    exc_info=error,
                )
            return [None] * len(trajectories)

    def _sum(self, grades: Mapping[str, Grade | None]) -> Grade | None:
        """Adds up the grades of one trajectory; None if a part with a weight has no grade of it."""
        reward, scores = 0.0, dict[str, float | None]()
        for name, grade in grades.items():
            scores[name] = None if grade is None else grade.reward
            if grade is not None:
                scores |= {f"{name}/{score}": value for score, value in grade.scores.items()}
            if not self._weights[name]:
                continue
            if grade is None:
                return None
            reward += self._weights[name] * grade.reward
        return Grade(reward=reward, scores=scores)


class ByName:
    """Grades by the reward that a prompt names (`Prompt.reward`); the one named "" grades prompts that name none.

        reward = ByName({"": MathReward(), "code": CodeReward()})

    A name that is missing ends the run with BadInput, which names the prompt.
    """

    def __init__(self, rewards: Mapping[str, Reward]) -> None:
        for name, reward in rewards.items():
            if isinstance(reward, GroupReward):
                raise ValueError(f"{name!r} grades whole groups. Fix: GroupByName in place of ByName")
        self._rewards = dict(rewards)

    async def __call__(self, trajectory: Trajectory) -> float | Grade:
        """Raises GraderUnavailable."""
        return await _chosen(self._rewards, trajectory)(trajectory)


class GroupByName:
    """Grades by the reward that a prompt names, as `ByName` does; any of the rewards may see the whole group."""

    sees_group: Literal[True] = True

    def __init__(self, rewards: Mapping[str, Reward | GroupReward]) -> None:
        self._rewards = {name: _of_group(reward) for name, reward in rewards.items()}

    async def __call__(self, trajectories: Sequence[Trajectory]) -> Grades:
        """Raises GraderUnavailable."""
        return await _chosen(self._rewards, trajectories[0])(trajectories)


def _finite(grade: Grade | None) -> Grade | None:
    """Returns a monitor's grade without scores that are not finite; None if its reward is not finite."""
    if grade is None or not math.isfinite(grade.reward):
        return None
    scores = {name: score for name, score in grade.scores.items() if score is None or math.isfinite(score)}
    return Grade(reward=grade.reward, scores=scores)


def _of_group(reward: Reward | GroupReward) -> GroupReward:
    return reward if isinstance(reward, GroupReward) else EachAlone(reward)


def _chosen(rewards: Mapping[str, Kind], trajectory: Trajectory) -> Kind:
    prompt = trajectory.prompt
    if prompt.reward not in rewards:
        there = ", ".join(repr(name) for name in rewards)
        raise BadInput(
            f"prompt {prompt.id}: no reward {prompt.reward!r} (there is: {there}). "
            "Fix: add it to the recipe's rewards, or change the prompt"
        )
    return rewards[prompt.reward]
