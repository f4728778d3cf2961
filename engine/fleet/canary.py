"""The canary: after every weight update each replica must give the learner's log-probabilities for fixed prompts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from engine.types import Floats, PublishedWeights

# Half the distance from 1 to the next number: the largest relative error of one rounding.
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
# Largest differences of log-probabilities, in units of roundoff * sqrt(layers), with room for other sequences. Measured
# between vLLM and the learner in float32: 90 to 126 (3 layers, hidden size 128), 110 to 147 (30, 576), and up to 735
# there after 26 steps of training, which made the distributions sharper. Of random Qwen3 with logits of deviation 2
# against float64: 20 to 42 in float32, 6 to 10 in bfloat16 (2 to 32 layers, 128 to 1024).
ROOM = {"float32": 1800.0, "bfloat16": 20.0}


def tolerance(dtype: str, *, layers: int) -> float:
    """How far log-probabilities of replicas of this dtype may be from the learner's. Raises ValueError.

    Both sides round what a layer adds to the residual stream, in different orders; these errors are as good as
    independent, so what reaches the logits grows with the square root of the layers. The hidden size does not enter:
    products are summed in blocks, and always in float32, so that eight times the width changed the error by less than
    two sets of random weights did. float32 has more room in its own unit, since there the sums round as the layers do.

    >>> [round(tolerance(dtype, layers=12), 5) for dtype in ("float32", "bfloat16")]
    [0.00037, 0.27063]
    """
    if dtype not in ROOM:
        raise ValueError(f"dtype must be {' or '.join(ROOM)}, whose rounding was measured, got {dtype!r}")
    if layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers!r}")
    return ROOM[dtype] * ROUNDOFF[dtype] * math.sqrt(layers)


def tolerance_of(checkpoint: Path | str, dtype: str) -> float:
    """`tolerance` for the number of layers in a checkpoint's config.json. Raises OSError or ValueError."""
    file = Path(checkpoint) / "config.json"
    fields = json.loads(file.read_text())
    layers = fields.get("text_config", fields).get("num_hidden_layers")
    if not isinstance(layers, int):
        raise ValueError(f"{file}: num_hidden_layers must be a whole number, got {layers!r}")
    return tolerance(dtype, layers=layers)


class CanaryFailed(RuntimeError):
    """A replica's log-probabilities differ from the learner's beyond the tolerance: it does not serve those weights."""


def compare(replica: int, found: Floats, weights: PublishedWeights, tolerance: float) -> float:
    """The largest difference. Raises CanaryFailed with the numbers when it is beyond the tolerance, or not a number."""
    difference = np.abs(found - weights.canary)
    worst = float(difference.max(initial=0.0))
    if not worst <= tolerance:
        at = int(difference.argmax())
        raise CanaryFailed(
            f"replica {replica} after weight update {weights.version}: log-probability of canary token {at} is "
            f"{found[at]:.6f}, the learner says {weights.canary[at]:.6f} (difference {worst:.2e}, tolerance "
            f"{tolerance:.1e}). Fix: if the model's own rounding is so large, a larger "
            "TrainingConfig.canary_tolerance, or float32 on both sides"
        )
    return worst
