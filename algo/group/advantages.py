"""Group-normalised advantages.

Invariants
- Everything is float64; the result of a group depends on that group alone, and on a deviation that the caller gives.
- A flat group (max - min == 0, a group of one included) gets exactly 0: no rounding noise divided by a tiny deviation.

Shape legend: G trajectories of a group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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
    std: float | None = None,
    eps: float = 1e-6,
) -> NDArray[np.float64]:
    """(r - mean) / (std + eps) with the group's sample deviation (ddof = 1), unless `std` gives another one.

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
    return centred_G / ((rewards_G.std(ddof=1) if std is None else std) + eps)
