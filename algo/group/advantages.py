"""Advantages: what is taken off a trajectory's reward, and what divides the rest.

Invariants
- Everything is float64; the result of a group depends on that group alone, unless baseline or scale are the batch's.
- A flat group (max - min == 0, a group of one included) gets exactly 0: no rounding noise divided by a tiny deviation.
  With the baseline of the batch that holds for a flat batch, and flat groups are trained like others.

Shape legend: G trajectories of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from sandbox.require import one_of, require, within

Baseline = Literal["mean", "leave_one_out", "length", "batch"]
Scale = Literal["group", "batch", "mean", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantage:
    """How rewards become advantages; a recipe gives the same one to `algo.group.batch.select_and_score` and
    `algo.group.batch.make_batch`.

    | method | advantage |
    |---|---|
    | GRPO (arXiv 2402.03300) | Advantage() |
    | Dr. GRPO (arXiv 2503.20783) | Advantage(scale="none") |
    | RLOO (arXiv 2402.14740) | Advantage(baseline="leave_one_out", scale="none") |
    | REINFORCE++ with baseline (arXiv 2501.03262) | Advantage(scale="batch") |
    | REINFORCE++ (arXiv 2501.03262) | Advantage(baseline="batch", scale="batch") |
    | OPO (arXiv 2505.23585) | Advantage(baseline="length", scale="none") |
    | MaxRL (arXiv 2602.02710) | Advantage(scale="mean") |

    >>> Advantage(baseline="first")
    Traceback (most recent call last):
    ValueError: Advantage.baseline must be one of 'mean', 'leave_one_out', 'length', 'batch', got 'first'
    """

    baseline: Baseline = "mean"
    """What is taken off a reward: "mean", that of its group; "leave_one_out", that of the group's others; "length", the
    group's mean weighted by the sampled tokens of each trajectory, sum(l r) / sum(l), which makes the variance of the
    gradient least where its square grows with the length (OPO's optimal reward baseline); "batch", the mean over the
    batch's trajectories, whatever their groups."""
    scale: Scale = "group"
    """What divides the rest: "group", the deviation within the group; "batch", that of the rest over the batch's
    trajectories; "mean", the mean reward of the group, whose gradient is that of the log of the success rate (MaxRL;
    rewards must be at least 0); "none", nothing."""
    eps: float = 1e-6
    """Added to what divides."""

    def __post_init__(self) -> None:
        for name, known in (("baseline", get_args(Baseline)), ("scale", get_args(Scale))):
            require(f"Advantage.{name}", getattr(self, name), one_of(*known))
        require("Advantage.eps", self.eps, within("[0, inf)"))
        if self.baseline == "batch" and self.scale not in ("batch", "none"):
            raise ValueError(f"Advantage.scale must be 'batch' or 'none' with baseline 'batch', got {self.scale!r}")

    @property
    def over_batch(self) -> bool:
        """Whether the groups of a batch have to be known."""
        return "batch" in (self.baseline, self.scale)

    def of_group(
        self, rewards_G: NDArray[np.float64], lengths_G: NDArray[np.int64] | None = None
    ) -> NDArray[np.float64]:
        """Of one group; with the scale of the batch, what `of_batch` has still to divide.

        lengths_G: sampled tokens, for the baseline "length". Raises ValueError for rewards that the scale cannot take.
        """
        rewards_G = np.asarray(rewards_G, dtype=np.float64)
        by_std = self.scale == "group"
        if self.baseline == "length":
            found_G = self._less_weighted_mean(_checked(rewards_G), lengths_G)
            if by_std:
                found_G = found_G / (rewards_G.std(ddof=1) + self.eps)
        else:
            out = self.baseline == "leave_one_out"
            found_G = group_advantages(rewards_G, divide_by_std=by_std, leave_one_out=out, eps=self.eps)
        if self.scale == "mean" and not is_flat(rewards_G):
            if rewards_G.min() < 0:
                raise ValueError(f"Advantage.scale 'mean' needs rewards of at least 0, got {rewards_G.min():g}")
            found_G = found_G / (rewards_G.mean() + self.eps)
        return found_G

    def _less_weighted_mean(
        self, rewards_G: NDArray[np.float64], lengths_G: NDArray[np.int64] | None
    ) -> NDArray[np.float64]:
        if lengths_G is None:
            raise ValueError("Advantage.baseline 'length' needs the lengths of the trajectories, got none")
        if is_flat(rewards_G):
            return np.zeros_like(rewards_G)
        return rewards_G - np.average(rewards_G, weights=np.maximum(lengths_G, 1))

    def of_batch(
        self, rewards: Sequence[NDArray[np.float64]], lengths: Sequence[NDArray[np.int64]] | None = None
    ) -> list[NDArray[np.float64]]:
        """Of the groups of a batch, each [G]; flat groups are gone unless the baseline is the batch's."""
        if not rewards:
            return []
        if self.baseline == "batch":
            every = _checked(np.concatenate(rewards))
            mean = every.mean() if not is_flat(every) else every[0]
            centred = [np.asarray(rewards_G, np.float64) - mean for rewards_G in rewards]
        else:
            lengths_of = lengths if lengths is not None else [None] * len(rewards)
            pairs = zip(rewards, lengths_of, strict=True)
            centred = [self.of_group(rewards_G, lengths_G) for rewards_G, lengths_G in pairs]
        together = np.concatenate(centred)
        if self.scale != "batch" or len(together) < 2:
            return centred
        deviation = float(together.std(ddof=1))
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
    rewards_G = _checked(np.asarray(rewards_G, dtype=np.float64))
    if is_flat(rewards_G):
        return np.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    if leave_one_out:
        centred_G *= len(rewards_G) / (len(rewards_G) - 1)
    if not divide_by_std:
        return centred_G
    return centred_G / (rewards_G.std(ddof=1) + eps)


def _checked(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    if rewards_G.ndim != 1:
        raise ValueError(f"rewards of one group expected, got shape {rewards_G.shape}")
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"rewards must be finite, got {rewards_G.tolist()}")
    return rewards_G
