"""Group-normalised advantages.

Invariants
- Everything is float64; the result of a group depends on that group alone, unless the scale is that of the batch.
- A flat group (max - min == 0, a group of one included) gets exactly 0: no rounding noise divided by a tiny deviation.

Shape legend: G trajectories of a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["group", "batch", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantage:
    """How rewards become advantages; a recipe gives the same one to `algo.group.batch.prepare` and
    `algo.group.batch.make_batch`.

    GRPO is the default; RLOO is Advantage(baseline="leave_one_out", scale="none"), Dr. GRPO Advantage(scale="none").

    >>> Advantage(baseline="first")
    Traceback (most recent call last):
    ValueError: Advantage.baseline must be one of ('mean', 'leave_one_out'), got 'first'
    """

    baseline: Baseline = "mean"
    """What is taken off a reward: the mean of its group, or that of the group's others."""
    scale: Scale = "group"
    """What divides the rest: the deviation within the group, that of the rest over the whole batch, or nothing."""
    eps: float = 1e-6
    """Added to the deviation."""

    def __post_init__(self) -> None:
        for name, known in (("baseline", get_args(Baseline)), ("scale", get_args(Scale))):
            if getattr(self, name) not in known:
                raise ValueError(f"Advantage.{name} must be one of {known}, got {getattr(self, name)!r}")
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"Advantage.eps must be at least 0 and finite, got {self.eps!r}")

    def of_group(self, rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of one group; with the scale of the batch, what `of_batch` has still to divide."""
        return group_advantages(
            rewards_G,
            divide_by_std=self.scale == "group",
            leave_one_out=self.baseline == "leave_one_out",
            eps=self.eps,
        )

    def of_batch(self, rewards: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
        """Of the groups of a batch, whose flat groups are gone, each [G]."""
        centred = [self.of_group(rewards_G) for rewards_G in rewards]
        if self.scale != "batch" or not centred:
            return centred
        deviation = float(np.concatenate(centred).std(ddof=1))
        return [centred_G / (deviation + self.eps) for centred_G in centred]


def is_flat(rewards_G: NDArray[np.float64], tolerance: float = 0.0) -> bool:
    """True when the group carries no signal: fewer than two rewards, or max - min <= tolerance.

    Source: dynamic sampling of DAPO (arXiv 2503.14476, section 3.2).
    """
    return bool(len(rewards_G) < 2 or np.max(rewards_G) - np.min(rewards_G) <= tolerance)


def group_advantages(
    rewards_G: NDArray[np.float64],
    *,
    divide_by_std: bool = True,
    leave_one_out: bool = False,
    eps: float = 1e-6,
) -> NDArray[np.float64]:
    """(r - mean) / (std + eps) with the group's sample deviation (ddof = 1).

    divide_by_std False: r - mean as in Dr. GRPO. leave_one_out: the mean is that of the others, G / (G - 1) times as
    far away; without the division that is RLOO. std: that of all centred rewards of the batch, for instance.
    Source: GRPO (arXiv 2402.03300, section 4.1), Dr. GRPO (arXiv 2503.20783), RLOO (arXiv 2402.14740).
    Returns float64 [G]. Raises ValueError when a reward is not finite or the array is not one-dimensional.

    >>> group_advantages(np.asarray([1.0, 0.0, 0.0]), divide_by_std=False, leave_one_out=True).tolist()
    [1.0, -0.5, -0.5]
    """
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    if rewards_G.ndim != 1:
        raise ValueError(f"rewards of one group expected, got shape {rewards_G.shape}")
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"rewards must be finite, got {rewards_G.tolist()}")
    if is_flat(rewards_G):
        return np.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    if leave_one_out:
        centred_G *= len(rewards_G) / (len(rewards_G) - 1)
    if not divide_by_std:
        return centred_G
    return centred_G / (rewards_G.std(ddof=1) + eps)
