"""Penalises a response for being long, before it is cut off.

Source: DAPO (arXiv 2503.14476, section 3.4, eq. 13). DAPO's other rule, no loss for a response that was cut off, is
`algo.group.selection.KeepFinished`.

With RoC and in the accuracies (`engine.ports.Reward`) a reward of 0 or less is a failure. A right answer of reward 1
that loses 1 for its length becomes one, and RoC draws it uniformly among the failures, whatever its tool errors. A
factor below 1 keeps right answers above 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.ports import Grade, Reward
from engine.types import Trajectory
from engine.user_parts import call
from sandbox.require import require, within


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongPenalty:
    """Grades as `reward` does and adds `overlong_penalty` for the sampled tokens of all turns.

        reward = OverlongPenalty(reward=MathReward(), longest=8192, buffer=2048, factor=0.5)

    Raises ValueError for values that `overlong_penalty` refuses.
    """

    reward: Reward
    longest: int
    buffer: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        self._penalty(0)

    async def __call__(self, trajectory: Trajectory) -> float | Grade:
        """Raises GraderUnavailable."""
        grade = await call("reward", self.reward, trajectory)
        penalty = self._penalty(trajectory.sampled_tokens)
        if isinstance(grade, Grade):
            return replace(grade, reward=grade.reward + penalty)
        return float(grade) + penalty

    def _penalty(self, length: int) -> float:
        return overlong_penalty(length, longest=self.longest, buffer=self.buffer, factor=self.factor)


def overlong_penalty(length: int, *, longest: int, buffer: int, factor: float = 1.0) -> float:
    """Returns what is added to a reward: 0 up to longest - buffer tokens, then linearly down to -factor at `longest`.

    Beyond `longest` it stays -factor. Which tokens count as the response's length is the caller's choice. Raises
    ValueError unless 0 < buffer <= longest.

    >>> overlong_penalty(14, longest=16, buffer=8)
    -0.75
    """
    require("buffer", buffer, within(f"(0, {longest}]"))
    return -factor * min(1.0, max(0.0, (length - (longest - buffer)) / buffer))
