"""The canary: after every weight update each replica must give the learner's log-probabilities for fixed prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.types import Floats

# Largest differences of log-probabilities between vLLM and the learner, with room for other sequences. Measured: fp32
# 1.4e-6 at most; bf16 0.03 to 0.05 at 97 M parameters.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.2}


def tolerance(dtype: str) -> float:
    """Of a canary with replicas of this dtype. Raises ValueError for one that was never measured."""
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype must be {' or '.join(TOLERANCES)}, got {dtype!r}")
    return TOLERANCES[dtype]


class CanaryFailed(RuntimeError):
    """A replica's log-probabilities differ from the learner's beyond the tolerance: it does not serve those weights."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Published weights and what the learner says of the canary sequences with them.

    path: where the learner says they are: a file (shm), or an address (gloo, nccl, ipc).
    """

    path: str
    version: int
    canary: Floats


def compare(replica: int, found: Floats, weights: Weights, tolerance: float) -> float:
    """The largest difference. Raises CanaryFailed with the numbers when it is beyond the tolerance, or not a number."""
    difference = np.abs(found - weights.canary)
    worst = float(difference.max(initial=0.0))
    if not worst <= tolerance:
        at = int(difference.argmax())
        raise CanaryFailed(
            f"replica {replica} after weight update {weights.version}: log-probability of canary token {at} is "
            f"{found[at]:.6f}, the learner says {weights.canary[at]:.6f} (difference {worst:.2e}, tolerance "
            f"{tolerance:.0e})"
        )
    return worst
