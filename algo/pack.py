"""Cuts a batch into minibatches, shares each over ranks, and pads it into microbatches of bounded size.

Invariants
- Every sampled token of the batch is a target exactly once, on exactly one rank.
- All ranks get the same number of microbatches (empty ones fill up): sharded models need matching collectives.
- Rows are padded on the right; with causal attention a real token never sees padding, so no mask is needed.
- The plan is a pure function of its arguments: every rank computes the same one.

Shape legend: N tokens and B trajectories of the batch, R rows and L columns of a microbatch, M positions with loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

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
    targets_M[i]. tokens counts the inputs that are not padding. position_ids_RL restart at 0 for each trajectory.
    sequence_M: which trajectory a target is of, in [0, sequences); trajectories_S: where that one stands in the batch.
    versions_M: the weight version that sampled the target.
    """

    token_ids_RL: NDArray[np.int64]
    position_ids_RL: NDArray[np.int64]
    positions_M: NDArray[np.int64]
    targets_M: NDArray[np.int64]
    old_logprobs_M: NDArray[np.float32]
    advantages_M: NDArray[np.float32]
    sequence_M: NDArray[np.int64]
    versions_M: NDArray[np.int32]
    trajectories_S: NDArray[np.int64]
    tokens: int

    @property
    def sequences(self) -> int:
        return len(self.trajectories_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """What one optimizer step sees: ranks[r] are the microbatches of rank r."""

    ranks: tuple[tuple[MicroBatch, ...], ...]

    @property
    def loss_tokens(self) -> int:
        """Targets over all ranks."""
        return sum(len(micro.targets_M) for micro in chain(*self.ranks))

    @property
    def sequences(self) -> int:
        """Trajectories with a target over all ranks."""
        return sum(micro.sequences for micro in chain(*self.ranks))

    @property
    def padding_waste(self) -> float:
        """Share of the computed input positions that are padding, over all ranks."""
        cells = sum(micro.token_ids_RL.size for micro in chain(*self.ranks))
        return 1.0 - sum(micro.tokens for micro in chain(*self.ranks)) / cells


def plan(batch: Batch, *, minibatches: int, micro_batch_tokens: int, ranks: int, seed: int) -> list[MiniBatch]:
    """Shuffled minibatches; those without a single target are left out.

    micro_batch_tokens bounds rows * columns, except that one trajectory longer than that gets a microbatch of its own.
    """
    starts_B = np.cumsum(batch.lengths_B) - batch.lengths_B
    # A trajectory's inputs are everything before its last sampled token: 0 when none can be a target.
    sampled_BT = np.split(batch.sampled_N, starts_B[1:])
    inputs_B = np.asarray([np.flatnonzero(sampled_T)[-1:].sum() for sampled_T in sampled_BT], np.int64)
    order_B = np.random.default_rng((seed, batch.step)).permutation(len(batch.lengths_B))
    order_B = order_B[inputs_B[order_B] > 0]
    result = []
    for chunk in filter(len, np.array_split(order_B, minibatches)):
        parts = [_micro_rows(share, inputs_B, micro_batch_tokens) for share in _split(chunk, inputs_B, ranks)]
        micros = ([_micro(batch, starts_B, inputs_B, rows) for rows in part] for part in parts)
        filled = zip(*zip_longest(*micros, fillvalue=EMPTY), strict=True)
        result.append(MiniBatch(ranks=tuple(filled)))
    return result


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


def _micro_rows(share: Sequence[int], inputs_B: NDArray[np.int64], micro_batch_tokens: int) -> list[Sequence[int]]:
    """Cuts rows sorted by falling length so that padding plus the overhead of the passes is least (shortest path)."""
    lengths = [int(inputs_B[row]) for row in share]
    best: list[tuple[int, list[Sequence[int]]]] = [(0, [])]  # least cost and cuts of the first n rows
    for end in range(1, len(lengths) + 1):
        options: list[tuple[int, int]] = []
        for start in range(end - 1, -1, -1):
            cells = (end - start) * lengths[start]
            if cells > micro_batch_tokens and options:
                break
            options.append((best[start][0] + cells + PASS_POSITIONS, start))
        cost, start = min(options)
        best.append((cost, [*best[start][1], share[start:end]]))
    return best[-1][1]


def _micro(batch: Batch, starts_B: NDArray[np.int32], inputs_B: NDArray[np.int64], rows: Sequence[int]) -> MicroBatch:
    rows_R = np.asarray(rows, np.int64)
    columns_L = np.arange(inputs_B[rows_R].max())
    real_RL = columns_L < inputs_B[rows_R, None]
    tokens_RL = np.where(real_RL, starts_B[rows_R, None] + columns_L, 0)  # indices on the N axis
    chosen_RL = real_RL & batch.sampled_N[tokens_RL + 1]
    targets_M = tokens_RL[chosen_RL] + 1
    return MicroBatch(
        token_ids_RL=np.where(real_RL, batch.token_ids_N[tokens_RL], 0).astype(np.int64),
        position_ids_RL=np.broadcast_to(columns_L, real_RL.shape).copy(),
        positions_M=np.flatnonzero(chosen_RL),
        targets_M=batch.token_ids_N[targets_M].astype(np.int64),
        old_logprobs_M=batch.logprobs_N[targets_M],
        advantages_M=batch.advantages_B[rows_R[chosen_RL.nonzero()[0]]],
        sequence_M=chosen_RL.nonzero()[0],
        versions_M=batch.versions_N[targets_M],
        trajectories_S=rows_R,
        tokens=int(real_RL.sum()),
    )


EMPTY = MicroBatch(
    token_ids_RL=np.zeros((1, 1), np.int64),
    position_ids_RL=np.zeros((1, 1), np.int64),
    positions_M=np.zeros(0, np.int64),
    targets_M=np.zeros(0, np.int64),
    old_logprobs_M=np.zeros(0, np.float32),
    advantages_M=np.zeros(0, np.float32),
    sequence_M=np.zeros(0, np.int64),
    versions_M=np.zeros(0, np.int32),
    trajectories_S=np.zeros(0, np.int64),
    tokens=0,
)
