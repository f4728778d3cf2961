"""How long trajectories will get: a Kaplan-Meier estimate of their sizes, scaled for each group by a gamma frailty.

A size is the number of tokens beyond the group's prompt. The survival of sizes is the product-limit estimate (Kaplan
and Meier 1958) over recent trajectories: those still going count as long as they have come, or the first to end, which
are the short ones, would make all look short. A group is easier or harder than others by a factor on its hazard,
gamma-distributed with mean 1 (a shared frailty, Clayton 1978): its members' ends and lengths so far give the posterior.

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
PRIOR = 4.0  # weight of the sizes assumed at first, in trajectories
ASSUMED = 0.25  # their scale, in bounds: most are short, so that a run of short ones begins with all of them
HORIZONS = (0.0, 0.08, 0.16, 0.25, 0.35, 0.5, 0.7, 0.9, 1.15, 1.6)  # in mean sizes
LAST = 20.0  # cumulative hazard at the bound, in place of infinity


@dataclass(slots=True)
class GroupStats:
    """A group as long as a member is there. hazard: what its members have come through, those running included."""

    prompt_tokens: int
    members: int = 0
    ended: list[int] = field(default_factory=list)  # sizes
    hazard: float = 0.0
    replicas: dict[int, int] = field(default_factory=dict)  # members of the active set of each


class LengthForecast:
    """Predicted tokens of trajectories at several horizons.

    max_tokens bounds a trajectory's length. frailty_shape: the shape of the gamma distribution; the smaller, the more a
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
        """A member came to its end by itself."""
        bin_of_end = min(size // self.bin_tokens, self._bins - 1)
        if len(self._ended) == self._ended.maxlen:
            self._deaths_B[self._ended[0]] -= 1
        self._ended.append(bin_of_end)
        self._deaths_B[bin_of_end] += 1
        group.ended.append(size)

    def refresh(self, sizes_N: Ints, groups_N: Sequence[GroupStats], groups: Sequence[GroupStats]) -> None:
        """Learns from those that are going on now: their sizes and groups. groups: every group that is there."""
        going_B = np.bincount(self._bin(sizes_N), minlength=self._bins + 1)
        ends_B = self._deaths_B + self._prior_B
        # at risk in a bin: who ended in it or later, and who has come beyond it
        risk_B = np.cumsum((ends_B + going_B[1:])[::-1])[::-1]
        marginal_B = np.cumsum(-np.log1p(-np.minimum(ends_B / risk_B, 1 - 1e-9)))
        marginal_B = np.minimum(np.concatenate(([0.0], marginal_B)), LAST)
        marginal_B[-1] = LAST
        self._hazard_B = self._frailty_shape * np.expm1(
            marginal_B / self._frailty_shape
        )  # mean-1 gamma mixture gives marginal
        alive_B = np.exp(-marginal_B)
        beyond_B = np.cumsum(alive_B[::-1])[::-1]
        self._remaining_B = self.bin_tokens * (beyond_B / alive_B - 0.5)
        self._edges_H = (np.array(HORIZONS) * self.mean_tokens()).astype(np.int64)
        ended = np.array([size for group in groups for size in group.ended], np.int64)
        of = np.repeat(np.arange(len(groups)), [len(group.ended) for group in groups])
        past = np.bincount(of, self._hazard_B[self._bin(ended)], minlength=len(groups))
        for group, hazard in zip(groups, past.tolist(), strict=True):  # in one go: a step may have thousands of groups
            group.hazard = hazard
        through_N = self._hazard_B[self._bin(sizes_N)]
        for group, through in zip(groups_N, through_N.tolist(), strict=True):
            group.hazard += through
        self.version += 1

    def horizons_within(self, tokens: float) -> int:
        """How many of the horizons are needed to look so many tokens ahead; at least the first, which is now."""
        return min(1 + int(np.searchsorted(self._edges_H, tokens)), len(HORIZONS))

    def mean_tokens(self) -> float:
        """Expected size of a trajectory that begins."""
        return float(self._remaining_B[0])

    def expected_remaining(self, sizes_N: Any) -> Any:
        """Expected tokens still to come at these sizes."""
        return self._remaining_B[self._bin(sizes_N)]

    def predict(self, sizes_N: Ints, groups_N: Sequence[GroupStats]) -> Ints:
        """Tokens held when each has gone on by a horizon (its size then, if it comes so far).

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
