"""Selectors that look at nothing: all trajectories, or a random subset as the control for RoC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.types import Trajectory


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Plain GRPO: everything that was sampled is trained."""

    def __call__(self, trajectories: Sequence[Trajectory], rng: np.random.Generator) -> list[int]:
        return list(range(len(trajectories)))


@dataclass(frozen=True, slots=True)
class RandomSubset:
    """Oversampling without RoC's choice: min(keep, N) trajectories, uniformly."""

    keep: int

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"RandomSubset.keep must be at least 1, got {self.keep!r}")

    def __call__(self, trajectories: Sequence[Trajectory], rng: np.random.Generator) -> list[int]:
        count = len(trajectories)
        return sorted(rng.choice(count, min(self.keep, count), replace=False).tolist())
