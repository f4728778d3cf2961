"""Predicts how long trajectories get: a Kaplan-Meier estimate of their sizes, scaled per group by a gamma frailty.

A size is the number of tokens beyond the group's prompt. The survival of sizes is the product-limit estimate (Kaplan
and Meier 1958) over recent trajectories. Active ones are censored at their present size; otherwise the first to end,
which are the short ones, would make all look short. A group is easier or harder than others by a factor on its hazard,
gamma-distributed with mean 1 (a shared frailty, Clayton 1978). Its members' ends and present sizes give the posterior.

Legend: N trajectories, H horizons, B bins of sizes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

BINS = 128
PRIOR = 4.0  # weight of the prior on sizes, in trajectories
ASSUMED = 0.25  # scale of the prior, relative to the bound: short, so that a batch of short ones begins all at once
HORIZONS = (0.0, 0.08, 0.16, 0.25, 0.35, 0.5, 0.7, 0.9, 1.15, 1.6)  # in mean sizes
LAST = 20.0  # cumulative hazard at the bound, in place of infinity


@dataclass(slots=True)
class GroupStats:
    """A group while it has members. hazard: the sum of its members' cumulative hazards, active ones included."""

    prompt_tokens: int
    members: int = 0
    ended: list[int] = field(default_factory=list)  # sizes of the members that ended by themselves
    hazard: float = 0.0
    replicas: dict[int, int] = field(default_factory=dict)  # number of members in the active set of each


class LengthForecast:
    """Predicts the tokens of trajectories at several horizons.

    max_tokens: bound of a trajectory's length. frailty_shape: of the gamma distribution; the smaller, the more a
    group's own past counts. history: how many ended trajectories are remembered.
    """

    def __init__(self, max_tokens: int, frailty_shape: float = 4.0, history: int = 4096) -> None:
        self.bin_tokens = -(-max_tokens // BINS)
        self._bins = -(-max_tokens // self.bin_tokens)
        self.version = 0
        self._frailty_shape = frailty_shape
        self._ended: deque[int] = deque(maxlen=history)
        self._deaths_B: Ints = np.zeros(self._bins, np.int64)
        assumed_B = np.exp(-np.arange(self._bins) / (ASSUMED * self._bins))
        self._prior_B: Reals = PRIOR * assumed_B / assumed_B.sum()
        self._edges_H: Ints
        self._hazard_B: Reals
        self._remaining_B: Reals
        self.refresh(np.zeros(0, np.int64), [], [])

    def end(self, group: GroupStats, size: int) -> None:
        """Records the size of a member that ended by itself."""
        bin_of_end = min(size // self.bin_tokens, self._bins - 1)
        if len(self._ended) == self._ended.maxlen:
            self._deaths_B[self._ended[0]] -= 1
        self._ended.append(bin_of_end)
        self._deaths_B[bin_of_end] += 1
        group.ended.append(size)

    def refresh(self, sizes_N: Ints, groups_N: Sequence[GroupStats], groups: Sequence[GroupStats]) -> None:
        """Learns from the active trajectories: their sizes and groups. groups: every group that has members."""
        active_B = np.bincount(self._bin(sizes_N), minlength=self._bins + 1)
        ends_B = self._deaths_B + self._prior_B
        # At risk in a bin are trajectories that ended in it or later, and active ones beyond it.
        risk_B = np.cumsum((ends_B + active_B[1:])[::-1])[::-1]
        marginal_B = np.cumsum(-np.log1p(-np.minimum(ends_B / risk_B, 1 - 1e-9)))
        marginal_B = np.minimum(np.concatenate(([0.0], marginal_B)), LAST)
        marginal_B[-1] = LAST
        # The hazard of a group of frailty 1: its mixture over frailties has the marginal hazard.
        self._hazard_B = self._frailty_shape * np.expm1(marginal_B / self._frailty_shape)
        alive_B = np.exp(-marginal_B)
        beyond_B = np.cumsum(alive_B[::-1])[::-1]
        self._remaining_B = self.bin_tokens * (beyond_B / alive_B - 0.5)
        self._edges_H = (np.array(HORIZONS) * self.mean_tokens()).astype(np.int64)
        ended = np.array([size for group in groups for size in group.ended], np.int64)
        group_of_ended = np.repeat(np.arange(len(groups)), [len(group.ended) for group in groups])
        hazard_of_ended = np.bincount(group_of_ended, self._hazard_B[self._bin(ended)], minlength=len(groups))
        for group, hazard in zip(groups, hazard_of_ended.tolist(), strict=True):  # a step may have thousands of groups
            group.hazard = hazard
        hazard_N = self._hazard_B[self._bin(sizes_N)]
        for group, hazard in zip(groups_N, hazard_N.tolist(), strict=True):
            group.hazard += hazard
        self.version += 1

    def horizons_within(self, tokens: float) -> int:
        """Returns how many horizons are needed to look so many tokens ahead: at least the first, which is now."""
        return min(1 + int(np.searchsorted(self._edges_H, tokens)), len(HORIZONS))

    def mean_tokens(self) -> float:
        """Returns the expected size of a new trajectory."""
        return float(self._remaining_B[0])

    def expected_remaining(self, sizes_N: Any) -> Any:
        """Returns the expected tokens still to come at these sizes."""
        return self._remaining_B[self._bin(sizes_N)]

    def predict(self, sizes_N: Ints, groups_N: Sequence[GroupStats]) -> Ints:
        """Returns the tokens that each trajectory holds after each horizon: its size then, or none if it ended before.

        (N, 2 H): the expectations, then the variances, as integers.
        """
        shape_N1 = self._frailty_shape + np.array([[len(group.ended)] for group in groups_N], np.float64)
        rate_N1 = self._frailty_shape + np.array([[group.hazard] for group in groups_N], np.float64)
        then_NH = sizes_N[:, None] + self._edges_H
        to_come_NH = self._hazard_B[self._bin(then_NH)] - self._hazard_B[self._bin(sizes_N)][:, None]
        alive_NH = np.exp(-shape_N1 * np.log1p(to_come_NH / rate_N1))
        held_NH = then_NH * alive_NH
        return np.rint(np.concatenate((held_NH, held_NH * then_NH * (1 - alive_NH)), axis=1)).astype(np.int64)

    def _bin(self, sizes: Any) -> Any:
        return np.minimum(sizes // self.bin_tokens, self._bins)
