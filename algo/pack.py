"""Cuts a batch into minibatches, shares each over ranks, and pads it into microbatches of bounded size.

Invariants
- Every sampled token of the batch is a target exactly once, on exactly one rank.
- All ranks get the same number of microbatches (empty ones fill up): sharded models need matching collectives.
- Rows are padded on the right; with causal attention a real token never sees padding, so no mask is needed.
- The plan is a pure function of its arguments: every rank computes the same one.

Shape legend: N tokens and B trajectories of the batch, R rows and L columns of a microbatch, M positions with loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from engine.types import Batch

# Attention's share of a token's cost reaches that of the linear layers at about this length in small models.
QUADRATIC_LENGTH = 4096
# What one more forward and backward pass costs besides its tokens, in input positions (measured on the 0.5M model).
PASS_POSITIONS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What one forward and backward pass sees.

    token_ids_RL are inputs; positions_M indexes their flattened form: the logits at positions_M[i] predict
    targets_M[i]. tokens counts the inputs that are not padding.
    """

    token_ids_RL: NDArray[np.int64]
    positions_M: NDArray[np.int64]
    targets_M: NDArray[np.int64]
    old_logprobs_M: NDArray[np.float32]
    advantages_M: NDArray[np.float32]
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """What one optimizer step sees. loss_tokens counts targets over all ranks; ranks[r] are the microbatches of r."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    loss_tokens: int

    @property
    def padding_waste(self) -> float:
        """Share of the computed input positions that are padding, over all ranks."""
        micros = [micro for rank in self.ranks for micro in rank]
        cells = sum(micro.token_ids_RL.size for micro in micros)
        return 1.0 - sum(micro.tokens for micro in micros) / max(1, cells)


def plan(batch: Batch, *, minibatches: int, micro_batch_tokens: int, ranks: int, seed: int) -> list[MiniBatch]:
    """Shuffled minibatches; those without a single target are left out.

    micro_batch_tokens bounds rows * columns, except that one trajectory longer than that gets a microbatch of its own.
    """
    starts_B = np.cumsum(batch.lengths_B) - batch.lengths_B
    inputs_B = _input_lengths(batch, starts_B)
    order_B = np.random.default_rng((seed, batch.step)).permutation(len(batch.lengths_B))
    order_B = order_B[inputs_B[order_B] > 0]
    result = []
    for chunk in np.array_split(order_B, minibatches):
        if not len(chunk):
            continue
        parts = [list(_micro_rows(share, inputs_B, micro_batch_tokens)) for share in _split(chunk, inputs_B, ranks)]
        most = max(len(part) for part in parts)
        micros = [[_micro(batch, starts_B, inputs_B, rows) for rows in part] for part in parts]
        filled = tuple((*part, *([EMPTY] * (most - len(part)))) for part in micros)
        tokens = sum(len(micro.targets_M) for part in filled for micro in part)
        result.append(MiniBatch(ranks=filled, loss_tokens=tokens))
    return result


def _input_lengths(batch: Batch, starts_B: NDArray[np.int32]) -> NDArray[np.int64]:
    """Inputs that a trajectory needs: everything before its last sampled token (0 when none can be a target)."""
    inputs_B = np.zeros(len(batch.lengths_B), np.int64)
    for row, (start, length) in enumerate(zip(starts_B, batch.lengths_B, strict=True)):
        sampled = np.flatnonzero(batch.sampled_N[start : start + length])
        inputs_B[row] = sampled[-1] if len(sampled) else 0
    return inputs_B


def _split(chunk: NDArray[np.int64], inputs_B: NDArray[np.int64], ranks: int) -> list[list[int]]:
    """Longest first, each to the rank with the least cost so far (LPT); deterministic."""
    longest_first = chunk[np.argsort(-inputs_B[chunk], kind="stable")]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for row in longest_first.tolist():
        rank = load.index(min(load))
        shares[rank].append(row)
        length = int(inputs_B[row])
        load[rank] += length * (1.0 + length / QUADRATIC_LENGTH)
    return shares


def _micro_rows(share: Sequence[int], inputs_B: NDArray[np.int64], micro_batch_tokens: int) -> Iterator[list[int]]:
    """Cuts rows sorted by falling length so that padding plus the overhead of the passes is least (shortest path)."""
    lengths = inputs_B[np.asarray(share, np.int64)].tolist()
    costs, cuts = [0], [0]
    for end in range(1, len(lengths) + 1):
        best, cut = costs[end - 1] + lengths[end - 1] + PASS_POSITIONS, end - 1
        for start in range(end - 2, -1, -1):
            cells = (end - start) * lengths[start]
            if cells > micro_batch_tokens:
                break
            if costs[start] + cells + PASS_POSITIONS <= best:
                best, cut = costs[start] + cells + PASS_POSITIONS, start
        costs.append(best)
        cuts.append(cut)
    bounds = [len(lengths)]
    while bounds[-1]:
        bounds.append(cuts[bounds[-1]])
    bounds.reverse()
    for start, end in pairwise(bounds):
        yield list(share[start:end])


def _micro(batch: Batch, starts_B: NDArray[np.int32], inputs_B: NDArray[np.int64], rows: Sequence[int]) -> MicroBatch:
    columns = int(inputs_B[rows].max())
    token_ids_RL = np.zeros((len(rows), columns), np.int64)
    targets, positions = [], []
    for index, row in enumerate(rows):
        start, length = int(starts_B[row]), int(inputs_B[row])
        token_ids_RL[index, :length] = batch.token_ids_N[start : start + length]
        sampled = 1 + np.flatnonzero(batch.sampled_N[start + 1 : start + length + 1])
        targets.append(start + sampled)
        positions.append(index * columns + sampled - 1)
    targets_N = np.concatenate(targets)
    return MicroBatch(
        token_ids_RL=token_ids_RL,
        positions_M=np.concatenate(positions),
        targets_M=batch.token_ids_N[targets_N].astype(np.int64),
        old_logprobs_M=batch.logprobs_N[targets_N],
        advantages_M=np.repeat(batch.advantages_B[rows], [len(part) for part in targets]),
        tokens=int(inputs_B[rows].sum()),
    )


EMPTY = MicroBatch(
    token_ids_RL=np.zeros((1, 1), np.int64),
    positions_M=np.zeros(0, np.int64),
    targets_M=np.zeros(0, np.int64),
    old_logprobs_M=np.zeros(0, np.float32),
    advantages_M=np.zeros(0, np.float32),
    tokens=0,
)
