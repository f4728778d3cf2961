"""The canary: after every weight update each replica must give the learner's log-probabilities for fixed prompts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.types import Floats, PublishedWeights

# Half the distance from 1 to the next number: the largest relative error of one rounding.
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
# Mean differences of log-probabilities, in units of roundoff * sqrt(layers), with room for other models. Measured on
# prompts between vLLM and the learner in bfloat16: 2.7 to 4.2 in 41 versions of the quick start's agent (3 layers), 3.7
# for SmolLM2-135M (30). A stale head, a stale or swapped layer, an older version gave 18 and more there; one stale
# projection, 5 to 7, is no more than rounding. In float32 the largest difference of a token was measured, 90 to 147 and
# 735 after training; the mean is a quarter of it or less.
ROOM = {"float32": 400.0, "bfloat16": 10.0}
ONE_TOKEN = 10.0  # times the mean that a single token may differ: measured were 4 to 10 times what the mean was


class Difference(NamedTuple):
    """|replica - learner| of the canary's log-probabilities."""

    mean_abs: float
    max_abs: float


def tolerance(dtype: str, *, layers: int) -> float:
    """How far log-probabilities may be from the learner's in the mean, where either side has this dtype. Raises
    ValueError.

    The mean is judged, since rounding averages out in it and a wrong weight does not: over the versions of a run it
    varies by a third, the largest difference by three times. Tokens are not weighed by their probability: the few that
    are likely decide a weighted mean, and those are where wrong weights change least.

    Both sides round what a layer adds to the residual stream, in different orders; these errors are as good as
    independent, so what reaches the logits grows with the square root of the layers. The hidden size does not enter:
    products are summed in blocks, and always in float32, so that eight times the width changed the error by less than
    two sets of random weights did. float32 has more room in its own unit, since there the sums round as the layers do.

    >>> [round(tolerance(dtype, layers=12), 5) for dtype in ("float32", "bfloat16")]
    [8e-05, 0.13532]
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


def compare(replica: int, found: Floats, weights: PublishedWeights, tolerance: float | None) -> Difference:
    """How far they are apart. tolerance: of the mean; a single token may be ONE_TOKEN times as far. None: not judged.

    Raises CanaryFailed with the numbers when it is further, or not a number.
    """
    difference = np.abs(found.astype(np.float64) - weights.canary)
    if not difference.size:
        return Difference(0.0, 0.0)
    between = Difference(float(difference.mean()), float(difference.max()))
    bound = math.inf if tolerance is None else tolerance
    if not (between.mean_abs <= bound and between.max_abs <= ONE_TOKEN * bound):
        at = int(difference.argmax())
        raise CanaryFailed(
            f"replica {replica} after weight update {weights.version}: log-probabilities of the canary's "
            f"{len(difference)} tokens differ from the learner's by {between.mean_abs:.2e} on average (tolerance "
            f"{bound:.1e}) and by at most {between.max_abs:.2e} (tolerance {ONE_TOKEN * bound:.1e}): of token {at} it "
            f"is {found[at]:.6f}, the learner says {weights.canary[at]:.6f}. Fix: if the model's own rounding is so "
            "large, a larger canary_tolerance, or float32 on both sides"
        )
    return between
