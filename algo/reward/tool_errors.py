"""Penalises failed tool calls.

The report of rStar2-Agent (arXiv 2508.20722) has no such penalty: it rewards the answer alone and cleans up tool use by
the choice of what is trained (`algo.group.roc`). recipes/rstar2/ablations.md compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.ports import Grade, Reward
from engine.types import Trajectory
from engine.user_parts import call
from sandbox.require import positive, require


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolErrorPenalty:
    """Grades as `reward` does and subtracts `factor` times the share of failed tool calls.

        reward = ToolErrorPenalty(reward=MathReward(), factor=0.5)

    A right answer of reward 1 stays above 0, and so counts as right, with a factor below 1. Raises ValueError unless
    the factor is positive.
    """

    reward: Reward
    factor: float

    def __post_init__(self) -> None:
        require("factor", self.factor, positive)

    async def __call__(self, trajectory: Trajectory) -> float | Grade:
        """Raises GraderUnavailable."""
        grade = await call("reward", self.reward, trajectory)
        penalty = self.factor * failed_share(trajectory)
        if isinstance(grade, Grade):
            return replace(grade, reward=grade.reward - penalty)
        return float(grade) - penalty


def failed_share(trajectory: Trajectory) -> float:
    """Returns failed calls / calls, 0 without a call. Malformed calls, timeouts and kills are failures."""
    uses = trajectory.tool_uses
    return sum(use.failed for use in uses) / len(uses) if uses else 0.0
