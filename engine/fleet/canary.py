"""The canary: after every weight update each replica must give the learner's log-probabilities for fixed prompts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.types import UNCOMPARED, Floats, PublishedWeights

# Half the distance from 1 to the next number: the largest relative error of one rounding.
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
# Allowed mean differences of log-probabilities, in units of roundoff * sqrt(layers), with room for other models. In
# bfloat16 we measured 2.7 to 4.2 between vLLM and the learner in 41 versions of the quick start's agent (3 layers), and
# 3.7 for SmolLM2-135M (30 layers). A stale head, a stale or swapped layer or an older version gave 18 and more there;
# one stale projection gave 5 to 7, no more than rounding may. In float32 we measured the largest difference of a token:
# 90 to 147, and 735 after training; the mean is a quarter of it or less.
ROOM = {"float32": 400.0, "bfloat16": 10.0}
ONE_TOKEN = 10.0  # a single token may differ by so many times the mean's tolerance; 4 to 10 times the mean was measured


class Difference(NamedTuple):
    """|replica - learner| of the canary's log-probabilities."""

    mean_abs: float
    max_abs: float


def tolerance(dtype: str, *, layers: int) -> float:
    """Returns how far log-probabilities may be from the learner's on average, if either side has this dtype.

    Raises ValueError for another dtype than float32 and bfloat16.

    The mean is judged, since rounding averages out in it and a wrong weight does not: over the versions of a run it
    varies by a third, the largest difference threefold. Tokens are not weighted by their probability: a weighted mean
    would depend on the few likely ones, where wrong weights change least.

    Both sides round what a layer adds to the residual stream, in different orders. These errors are as good as
    independent, so their sum at the logits grows with the square root of the layers. The hidden size does not matter:
    products are summed in blocks and always in float32, and eight times the width changed the error by less than
    another set of random weights did. float32 has more room in its own unit, since there the sums round as the layers
    do.

    >>> [round(tolerance(dtype, layers=12), 5) for dtype in ("float32", "bfloat16")]
    [8e-05, 0.13532]
    """
    if dtype not in ROOM:
        raise ValueError(f"dtype must be {' or '.join(ROOM)}, whose rounding was measured, got {dtype!r}")
    if layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers!r}")
    return ROOM[dtype] * ROUNDOFF[dtype] * math.sqrt(layers)


def tolerance_of(checkpoint: Path | str, dtype: str) -> float:
    """Returns `tolerance` for the number of layers in a checkpoint's config.json. Raises OSError or ValueError."""
    file = Path(checkpoint) / "config.json"
    fields = json.loads(file.read_text())
    layers = fields.get("text_config", fields).get("num_hidden_layers")
    if not isinstance(layers, int):
        raise ValueError(f"{file}: num_hidden_layers must be a whole number, got {layers!r}")
    return tolerance(dtype, layers=layers)


class CanaryFailed(RuntimeError):
    """A replica's log-probabilities differ from the learner's beyond the tolerance. It does not serve the weights."""


def compare(replica: int, logprobs: Floats, weights: PublishedWeights, tolerance: float | None) -> Difference:
    """Returns how far the replica's log-probabilities are from the learner's.

    tolerance: for the mean; a single token may differ by ONE_TOKEN times as much. None: any number passes. Raises
    CanaryFailed with the numbers if the difference is larger, or not a number.
    """
    compared = np.flatnonzero(weights.canary != UNCOMPARED)
    per_token = np.abs(logprobs.astype(np.float64)[compared] - weights.canary[compared])
    if not per_token.size:
        return Difference(0.0, 0.0)
    difference = Difference(float(per_token.mean()), float(per_token.max()))
    bound = math.inf if tolerance is None else tolerance
    if not (difference.mean_abs <= bound and difference.max_abs <= ONE_TOKEN * bound):
        at = int(compared[per_token.argmax()])
        raise CanaryFailed(
            f"replica {replica} after weight update {weights.version}: log-probabilities of the canary's "
            f"{len(per_token)} tokens differ from the learner's by {difference.mean_abs:.2e} on average (tolerance "
            f"{bound:.1e}) and by at most {difference.max_abs:.2e} (tolerance {ONE_TOKEN * bound:.1e}): token {at} has "
            f"{logprobs[at]:.6f}, and {weights.canary[at]:.6f} in the learner. Fix: if the model's own rounding is so "
            "large, raise canary_tolerance, or use float32 on both sides"
        )
    return difference
