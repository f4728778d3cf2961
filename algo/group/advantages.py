"""Turns the rewards of a group into advantages: a baseline is subtracted, and a scale divides the rest.

Invariants
- Everything is float64. The result of a group depends on that group alone, unless the baseline or scale is the batch's.
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
    """How rewards become advantages; `select_and_score` and `make_batch` of `algo.group.batch` are given the same one.

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
    """What is subtracted from a reward: "mean", the group's mean; "leave_one_out", the mean of the group's other
    rewards; "length", the group's mean weighted by the sampled tokens of each trajectory, sum(l r) / sum(l), which
    minimises the gradient's variance if its square grows with the length (OPO's optimal reward baseline); "batch", the
    mean over the batch's trajectories, whatever their groups."""
    scale: Scale = "group"
    """What divides the rest: "group", its deviation within the group; "batch", its deviation over the batch's
    trajectories; "mean", the group's mean reward, which gives the gradient of the log of the success rate (MaxRL;
    rewards must be at least 0); "none", nothing."""
    eps: float = 1e-6
    """Small number that is added to the divisor."""

    def __post_init__(self) -> None:
        for name, known in (("baseline", get_args(Baseline)), ("scale", get_args(Scale))):
            require(f"Advantage.{name}", getattr(self, name), one_of(*known))
        require("Advantage.eps", self.eps, within("[0, inf)"))
        if self.baseline == "batch" and self.scale not in ("batch", "none"):
            raise ValueError(f"Advantage.scale must be 'batch' or 'none' with baseline 'batch', got {self.scale!r}")

    @property
    def over_batch(self) -> bool:
        """Whether advantages need all groups of a batch."""
        return "batch" in (self.baseline, self.scale)

    def of_group(
        self, rewards_G: NDArray[np.float64], lengths_G: NDArray[np.int64] | None = None
    ) -> NDArray[np.float64]:
        """Returns the advantages of one group, [G]. With the scale of the batch, `of_batch` has still to divide them.

        lengths_G: sampled tokens, for the baseline "length". Raises ValueError for rewards that the scale cannot take.
        """
        rewards_G = np.asarray(rewards_G, dtype=np.float64)
        by_std = self.scale == "group"
        if self.baseline == "length":
            advantages_G = self._less_weighted_mean(_checked(rewards_G), lengths_G)
            if by_std and not is_flat(rewards_G):
                advantages_G = advantages_G / (rewards_G.std(ddof=1) + self.eps)
        else:
            out = self.baseline == "leave_one_out"
            advantages_G = group_advantages(rewards_G, divide_by_std=by_std, leave_one_out=out, eps=self.eps)
        if self.scale == "mean" and not is_flat(rewards_G):
            if rewards_G.min() < 0:
                raise ValueError(f"Advantage.scale 'mean' needs rewards of at least 0, got {rewards_G.min():g}")
            advantages_G = advantages_G / (rewards_G.mean() + self.eps)
        return advantages_G

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
        """Returns the advantages of a batch's groups, each [G]; flat groups get 0 unless the batch is the baseline."""
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
    """Returns whether a group carries no signal: it has fewer than two rewards, or max - min <= tolerance.

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
    """Returns (r - mean) / (std + eps), float64 [G], with the group's sample deviation (ddof = 1).

    divide_by_std: if False, returns r - mean, as in Dr. GRPO.
    leave_one_out: uses the mean of the others, which is G / (G - 1) times as far away; without the division that is
    RLOO.

    Source: GRPO (arXiv 2402.03300, section 4.1), Dr. GRPO (arXiv 2503.20783), RLOO (arXiv 2402.14740). Raises
    ValueError when a reward is not finite or the array is not one-dimensional.

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
