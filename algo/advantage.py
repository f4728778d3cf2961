"""Group-normalised advantages.

Invariants
- Everything is float64; the result of a group depends on that group alone.
- A flat group (max - min == 0, a group of one included) gets exactly 0: no rounding noise divided by a tiny deviation.

Shape legend: G trajectories of a group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def is_flat(rewards_G: NDArray[np.float64]) -> bool:
    """True when the group carries no signal: all rewards are equal, or there are fewer than two."""
    return bool(len(rewards_G) < 2 or np.max(rewards_G) - np.min(rewards_G) == 0)


def group_advantages(
    rewards_G: NDArray[np.float64], *, divide_by_std: bool = True, eps: float = 1e-6
) -> NDArray[np.float64]:
    """(r - mean) / (std + eps) with the sample deviation (ddof = 1); without the division as in Dr. GRPO.

    Source: GRPO (arXiv 2402.03300, section 4.1), Dr. GRPO (arXiv 2503.20783). Returns float64 [G].
    Raises ValueError when a reward is not finite or the array is not one-dimensional.
    """
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    if rewards_G.ndim != 1:
        raise ValueError(f"rewards of one group expected, got shape {rewards_G.shape}")
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"rewards must be finite, got {rewards_G.tolist()}")
    if is_flat(rewards_G):
        return np.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    return centred_G / (rewards_G.std(ddof=1) + eps) if divide_by_std else centred_G
