"""Combines the counts of passes into a step's metrics.

Invariant: a name tells how its values are combined. `..._max` is a maximum; everything else is a sum over tokens, which
the step reports per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Numbers of input positions, which are reported as shares.
ROUTING = ("routed", "unrouted", "routed_otherwise")
# Values of a minibatch as a whole, of which the step reports the mean.
OF_A_MINIBATCH = ("load_balancing", "experts_unused")
# These compare with the sampler only in the first minibatch, before the step has learnt anything.
BEFORE_THE_UPDATE = ("mismatch_max", "mismatch_fresh_max")


def reduced(counts: Sequence[dict[str, Tensor]], square: Tensor, copies: int = 1) -> dict[str, float]:
    """Combines the counts of all microbatches of all ranks, equally named; `square` is this rank's. A collective.

    copies: how many ranks count the same microbatches.
    """
    maxima = [name for name in counts[0] if name.endswith("_max")]
    sums = [name for name in counts[0] if name not in maxima]
    added = torch.cat([_table(counts, sums).sum(0) / copies, square.double()[None]])
    largest = _table(counts, maxima).amax(0)
    if dist.get_world_size() > 1:
        dist.all_reduce(added)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    result = dict(zip([*sums, "square"], added.tolist(), strict=True))
    result |= dict(zip(maxima, largest.tolist(), strict=True))
    return result


def _table(counts: Sequence[dict[str, Tensor]], names: Sequence[str]) -> Tensor:
    """Returns a row for each microbatch, a column for each name."""
    return torch.stack([torch.stack([count[name].double() for name in names]) for count in counts])


def summary(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the metrics of a step from those of its minibatches."""
    tokens = sum(result["tokens"] for result in results)
    first = results[0]
    metrics = {"tokens": tokens, "loss": sum(result["loss"] * result["tokens"] for result in results) / tokens}
    metrics |= _routing(results)
    for name in first:
        if name in ROUTING:
            continue
        values = [result[name] for result in results]
        if name == "mismatch_fresh_mean":
            if first["mismatch_checked"]:  # otherwise there is no such token
                metrics[name] = first[name] / first["mismatch_checked"]
        elif name in BEFORE_THE_UPDATE:
            metrics[name] = values[0]
        elif name in OF_A_MINIBATCH:
            metrics[name] = sum(values) / len(values)
        elif name not in metrics:
            metrics[name] = max(values) if name.endswith("_max") or name == "grad_norm" else sum(values) / tokens
    return metrics


def _routing(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the share of positions without the sampler's route, and of those with one the share that the learner
    would have routed otherwise in some layer, before it has learnt anything. It is empty for a dense model.
    """
    if "routed" not in results[0]:
        return {}
    routed, unrouted = (sum(result[name] for result in results) for name in ("routed", "unrouted"))
    shares = {"routing_unknown": unrouted / max(1.0, routed + unrouted)}
    if results[0]["routed"]:
        shares["routing_differs"] = results[0]["routed_otherwise"] / results[0]["routed"]
    return shares
