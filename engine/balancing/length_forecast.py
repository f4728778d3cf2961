"""How much trajectories will grow: the survival of their sizes, bent for each group by what its members did.

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
PRIOR = 4.0  # weight of the sizes assumed at first (all up to the bound alike), in trajectories
HORIZONS = (0.0, 0.08, 0.16, 0.25, 0.35, 0.5, 0.7, 0.9, 1.15, 1.6)  # in mean sizes
LAST = 20.0  # cumulative hazard at the bound, in place of infinity


@dataclass(slots=True)
class Kin:
    """A group as long as a member is there. hazard: what its members have come through, those running included."""

    prompt_tokens: int
    members: int = 0
    ended: list[int] = field(default_factory=list)  # sizes
    hazard: float = 0.0
    replicas: dict[int, int] = field(default_factory=dict)  # members of the active set of each


class Growth:
    """Predicted tokens of trajectories at several horizons.

    max_tokens bounds a trajectory's length. evenness: the shape of the gamma distribution; the smaller, the more a
    group's own past counts. history: how many ended trajectories are remembered.
    """

    def __init__(self, max_tokens: int, evenness: float = 4.0, history: int = 4096) -> None:
        self.bin_tokens = -(-max_tokens // BINS)
        self._bins = -(-max_tokens // self.bin_tokens)
        self.version = 0
        self._evenness = evenness
        self._ended: deque[int] = deque(maxlen=history)
        self._deaths_B: Ints = np.zeros(self._bins, np.int64)
        self._edges_H: Ints
        self._hazard_B: Reals
        self._rest_B: Reals
        self.refresh(np.zeros(0, np.int64), [], [])

    def end(self, kin: Kin, size: int) -> None:
        """A member came to its end by itself."""
        place = min(size // self.bin_tokens, self._bins - 1)
        if len(self._ended) == self._ended.maxlen:
            self._deaths_B[self._ended[0]] -= 1
        self._ended.append(place)
        self._deaths_B[place] += 1
        kin.ended.append(size)

    def refresh(self, sizes_N: Ints, kin_N: Sequence[Kin], kins: Sequence[Kin]) -> None:
        """Learns from those that are going on now: their sizes and groups. kins: every group that is there."""
        going_B = np.bincount(self._place(sizes_N), minlength=self._bins + 1)
        ends_B = self._deaths_B + PRIOR / self._bins
        # at risk in a bin: who ended in it or later, and who has come beyond it
        risk_B = np.cumsum((ends_B + going_B[1:])[::-1])[::-1]
        marginal_B = np.cumsum(-np.log1p(-np.minimum(ends_B / risk_B, 1 - 1e-9)))
        marginal_B = np.minimum(np.concatenate(([0.0], marginal_B)), LAST)
        marginal_B[-1] = LAST
        self._hazard_B = self._evenness * np.expm1(marginal_B / self._evenness)  # mean-1 gamma mixture gives marginal
        alive_B = np.exp(-marginal_B)
        beyond_B = np.cumsum(alive_B[::-1])[::-1]
        self._rest_B = self.bin_tokens * (beyond_B / alive_B - 0.5)
        self._edges_H = (np.array(HORIZONS) * self.mean_tokens()).astype(np.int64)
        ended = np.array([size for kin in kins for size in kin.ended], np.int64)
        of = np.repeat(np.arange(len(kins)), [len(kin.ended) for kin in kins])
        past = np.bincount(of, self._hazard_B[self._place(ended)], minlength=len(kins))
        for kin, hazard in zip(kins, past.tolist(), strict=True):  # in one go: a step may have thousands of groups
            kin.hazard = hazard
        through_N = self._hazard_B[self._place(sizes_N)]
        for kin, through in zip(kin_N, through_N.tolist(), strict=True):
            kin.hazard += through
        self.version += 1

    def mean_tokens(self) -> float:
        """Expected size of a trajectory that begins."""
        return float(self._rest_B[0])

    def rest_tokens(self, sizes_N: Any) -> Any:
        """Expected tokens still to come at these sizes."""
        return self._rest_B[self._place(sizes_N)]

    def predict(self, sizes_N: Ints, kin_N: Sequence[Kin]) -> Ints:
        """Tokens held when each has gone on by a horizon (its size then, if it comes so far).

        (N, 2 H): the expectations, then the variances, as integers.
        """
        shape_N1 = self._evenness + np.array([[len(kin.ended)] for kin in kin_N], np.float64)
        rate_N1 = self._evenness + np.array([[kin.hazard] for kin in kin_N], np.float64)
        then_NH = sizes_N[:, None] + self._edges_H
        to_come_NH = self._hazard_B[self._place(then_NH)] - self._hazard_B[self._place(sizes_N)][:, None]
        alive_NH = np.exp(-shape_N1 * np.log1p(to_come_NH / rate_N1))
        held_NH = then_NH * alive_NH
        return np.rint(np.concatenate((held_NH, held_NH * then_NH * (1 - alive_NH)), axis=1)).astype(np.int64)

    def _place(self, sizes: Any) -> Any:
        return np.minimum(sizes // self.bin_tokens, self._bins)
