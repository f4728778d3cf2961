"""Selectors other than RoC: all trajectories, a random subset as RoC's control, and those that no limit cut off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.ports import Selector
from engine.types import StopReason, Trajectory
from sandbox.require import at_least, require

CUT_OFF = (StopReason.LENGTH, StopReason.TURNS, StopReason.DEADLINE)


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Selects everything that was sampled: plain GRPO."""

    def __call__(self, trajectories: Sequence[Trajectory], rng: np.random.Generator) -> list[int]:
        return list(range(len(trajectories)))

    def explain(self, trajectories: Sequence[Trajectory]) -> list[dict[str, float]]:
        return [{"probability": 1.0}] * len(trajectories)


@dataclass(frozen=True, slots=True)
class RandomSubset:
    """Selects min(keep, N) trajectories uniformly: oversampling without RoC's choice."""

    keep: int

    def __post_init__(self) -> None:
        require("RandomSubset.keep", self.keep, at_least(1))

    def __call__(self, trajectories: Sequence[Trajectory], rng: np.random.Generator) -> list[int]:
        count = len(trajectories)
        return sorted(rng.choice(count, min(self.keep, count), replace=False).tolist())

    def explain(self, trajectories: Sequence[Trajectory]) -> list[dict[str, float]]:
        return [{"probability": min(1.0, self.keep / len(trajectories))}] * len(trajectories)


@dataclass(frozen=True, slots=True)
class KeepFinished:
    """Lets `then` select among the trajectories that no limit cut off: overlong filtering.

    Source: DAPO (arXiv 2503.14476, section 3.4). rStar2-Agent saw more truncation with it (arXiv 2508.20722).
    """

    then: Selector

    def __call__(self, trajectories: Sequence[Trajectory], rng: np.random.Generator) -> list[int]:
        finished = [index for index, trajectory in enumerate(trajectories) if trajectory.stop not in CUT_OFF]
        return [finished[index] for index in self.then([trajectories[index] for index in finished], rng)]
