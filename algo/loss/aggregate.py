"""Combines losses of tokens into the loss of a minibatch, and sums over sequences.

Invariants
- A loss is a sum of terms divided by counts of the whole minibatch (over all ranks and microbatches), which the caller
  gives: the losses of parts add up to that of the whole, as long as no sequence is cut.
- Only positions that carry loss come in, so a masked value cannot leak. Without any position the loss is 0, attached to
  the graph.
- A sequence without a position changes nothing.

Shape legend: M positions with loss, S sequences (or prompts); sequence_M holds each position's sequence in [0, S).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def choose(mask: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Returns each tensor at the positions where the mask is not 0, flattened to [M]."""
    return [tensor[mask.bool()] for tensor in tensors]


def total(losses_M: Tensor, count: float | Tensor) -> Tensor:
    """Returns sum(losses_M) / count.

    count: the minibatch's tokens for the token mean (DAPO, arXiv 2503.14476), its sequences for the sequence mean of
    token sums, or sequences times the longest length allowed for Dr. GRPO's constant divisor (arXiv 2503.20783).
    """
    return losses_M.sum() / count


def mean_of_means(losses_M: Tensor, sequence_M: Tensor, sequences: int, count: float | Tensor) -> Tensor:
    """Returns the sum of each sequence's token mean, divided by count: the minibatch's sequences that have tokens.

    With a prompt's number in place of a sequence's it is the mean over prompts of their token means.
    """
    return over_sequence(losses_M, sequence_M, sequences, "mean").sum() / count


def over_sequence(
    values_M: Tensor, sequence_M: Tensor, sequences: int, reduce: Literal["sum", "mean", "max"]
) -> Tensor:
    """Returns the sum, mean or maximum of each sequence's values, [S]; 0 for a sequence without a position."""
    zeros_S = values_M.new_zeros(sequences)
    if reduce == "max":
        return zeros_S.scatter_reduce(0, sequence_M, values_M, "amax", include_self=False)
    sums_S = zeros_S.index_add(0, sequence_M, values_M)
    if reduce == "sum":
        return sums_S
    return sums_S / torch.bincount(sequence_M, minlength=sequences).clamp(min=1)
