"""Divides a batch into minibatches, shares each over ranks, and packs it into rows of bounded length.

Invariants
- Every sampled token of the batch is a target exactly once, on exactly one rank; no trajectory is cut.
- A row holds whole trajectories one after another and nothing else: there is no padding.
- The common beginning of all trajectories of a minibatch (a system message, tools, the prompt of a single group) is
  computed once a row: it stands at the row's beginning, and each trajectory continues it.
- All ranks get the same number of microbatches (empty ones fill up), since sharded models need matching collectives.
- A position that trajectories share has the same route in all of them, so every token is computed by the experts that
  the sampler chose for its trajectory.
- The plan is a pure function of its arguments: every rank computes the same one, and makes its own microbatches only.

Shape legend: N tokens and B trajectories of the batch, R = 1 row of L tokens and S trajectories in a microbatch, M
positions with loss, K tokens that a teacher thinks likeliest at a position, X layers that are mixtures of experts, E
experts that a token is sent to in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.types import Batch

# With fewer common tokens, sharing saves less than attention over two pieces costs.
LEAST_SHARED = 64
# At about this length attention costs as much per token as the linear layers of a small model.
QUADRATIC_LENGTH = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The input of one forward and backward pass: trajectories side by side in one row, which must not see each other.

    The row begins with `shared` tokens, which each trajectory continues with lengths_S[i] tokens of its own; their
    position_ids_RL continue too. positions_M indexes the row: the logits at positions_M[i] predict targets_M[i], which
    was sampled by weight version versions_M[i] with old_logprobs_M[i] in trajectory sequence_M[i] of this microbatch.
    trajectories_S are the trajectories' places in the batch. advantages_M are those of the trajectories and of the
    tokens, added up. teacher_ids_MK and teacher_logprobs_MK are as in the batch; K is 0 without them. routes_LXE: the
    experts of each position of the row, as in the batch; None if the batch has none.
    """

    token_ids_RL: NDArray[np.int64]
    position_ids_RL: NDArray[np.int64]
    shared: int
    lengths_S: NDArray[np.int32]
    trajectories_S: NDArray[np.int64]
    positions_M: NDArray[np.int64]
    targets_M: NDArray[np.int64]
    old_logprobs_M: NDArray[np.float32]
    advantages_M: NDArray[np.float32]
    versions_M: NDArray[np.int32]
    sequence_M: NDArray[np.int64]
    teacher_ids_MK: NDArray[np.int64]
    teacher_logprobs_MK: NDArray[np.float32]
    routes_LXE: NDArray[Any] | None = None

    @property
    def sequences(self) -> int:
        return len(self.lengths_S)

    @property
    def tokens(self) -> int:
        """Number of inputs; 0 for the filler."""
        return self.token_ids_RL.size if len(self.targets_M) else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """The input of one optimizer step on one rank, with what it needs to know of the others."""

    micros: tuple[MicroBatch, ...]
    loss_tokens: int
    """Number of targets over all ranks."""
    sequences: int
    """Number of trajectories with a target, over all ranks."""
    lengths: tuple[int, ...]
    """Number of inputs of each trajectory, over all ranks; a row's shared beginning counts as a trajectory."""
    padding_waste: float
    """Share of the computed input positions that are filler, over all ranks."""


def plan(
    batch: Batch,
    *,
    minibatches: int,
    micro_batch_tokens: int,
    ranks: int,
    seed: int,
    rank: int = 0,
    share_prefix: bool = False,
    parts: int = 1,
) -> list[MiniBatch]:
    """Returns shuffled minibatches for one rank, without those that have no target.

    micro_batch_tokens: bounds a row's length, except that a longer trajectory gets a row of its own.
    share_prefix: computes the common beginning of all trajectories of a minibatch once a row.
    parts: how many equal parts each row is divided into afterwards; what fills them up counts as filler. Those who
    share a row then count as one rank.
    """
    starts_B = np.cumsum(batch.lengths_B) - batch.lengths_B
    # A trajectory's inputs are everything before its last sampled token: 0 if none can be a target.
    sampled_BT = np.split(batch.sampled_N, starts_B[1:])
    inputs_B = np.asarray([np.flatnonzero(sampled_T)[-1:].sum() for sampled_T in sampled_BT], np.int64)
    targets_B = np.asarray([np.count_nonzero(sampled_T[1:]) for sampled_T in sampled_BT], np.int64)
    order_B = np.random.default_rng((seed, batch.step)).permutation(len(batch.lengths_B))
    order_B = order_B[inputs_B[order_B] > 0]
    result = []
    for chunk in filter(len, np.array_split(order_B, minibatches)):
        shared = _shared(batch, starts_B, chunk) if share_prefix else 0
        own_B = inputs_B - shared
        shares = [_rows(share, own_B, micro_batch_tokens - shared) for share in _split(chunk, own_B, ranks)]
        rows = max(map(len, shares))  # of each rank
        lengths = [n for share in shares for row in share for n in (shared, *own_B[row].tolist()) if n]
        fillers = parts * (rows * ranks - sum(map(len, shares)))
        fillers += sum(-(shared + int(own_B[row].sum())) % parts for share in shares for row in share)
        micros = [_micro(batch, starts_B, own_B, shared, row) for row in shares[rank]]
        minibatch = MiniBatch(
            micros=(*micros, *[EMPTY] * (rows - len(micros))),
            loss_tokens=int(targets_B[chunk].sum()),
            sequences=len(chunk),
            lengths=tuple(lengths),
            padding_waste=fillers / (sum(lengths) + fillers),
        )
        result.append(minibatch)
    return result


def _shared(batch: Batch, starts_B: NDArray[np.int32], chunk: NDArray[np.int64]) -> int:
    """Returns how many unsampled tokens all these trajectories begin with; 0 if it is not worth sharing them."""
    first = starts_B[chunk[0]]
    shared = int(batch.lengths_B[chunk[0]])
    for start, length in zip(starts_B[chunk], batch.lengths_B[chunk], strict=True):
        shared = min(shared, int(np.argmax(batch.sampled_N[start : start + length])))
        differs = batch.token_ids_N[start : start + shared] != batch.token_ids_N[first : first + shared]
        if batch.routes_NXE is not None:
            routes = batch.routes_NXE[start : start + shared], batch.routes_NXE[first : first + shared]
            differs |= (routes[0] != routes[1]).any((1, 2))
        shared = int(np.argmax(differs)) if differs.any() else shared
    return shared if shared >= LEAST_SHARED and len(chunk) > 1 else 0


def _split(chunk: NDArray[np.int64], inputs_B: NDArray[np.int64], ranks: int) -> list[list[int]]:
    """Gives the longest trajectory first to the rank with the least cost so far (LPT); deterministic."""
    longest_first = chunk[np.argsort(-inputs_B[chunk], kind="stable")]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for trajectory in longest_first.tolist():
        rank = load.index(min(load))
        shares[rank].append(trajectory)
        length = int(inputs_B[trajectory])
        load[rank] += length * (1.0 + length / QUADRATIC_LENGTH)
    return shares


def _rows(share: Sequence[int], inputs_B: NDArray[np.int64], micro_batch_tokens: int) -> list[list[int]]:
    """Puts trajectories of falling length into the first row that has room (first fit decreasing)."""
    rows: list[list[int]] = []
    room: list[int] = []
    for trajectory in share:
        length = int(inputs_B[trajectory])
        row = next((row for row, free in enumerate(room) if free >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(max(micro_batch_tokens, length))
        rows[row].append(trajectory)
        room[row] -= length
    return rows


def _micro(
    batch: Batch, starts_B: NDArray[np.int32], own_B: NDArray[np.int64], shared: int, row: Sequence[int]
) -> MicroBatch:
    lengths_S = own_B[row]
    sequence_L = np.repeat(np.arange(len(row)), lengths_S)
    own_position_L = np.arange(len(sequence_L)) - (np.cumsum(lengths_S) - lengths_S)[sequence_L]
    position_ids_L = np.concatenate([np.arange(shared), shared + own_position_L])
    tokens_L = np.concatenate(  # indices on the N axis
        [starts_B[row[0]] + np.arange(shared), starts_B[row][sequence_L] + shared + own_position_L]
    )
    # Targets are in the order of the trajectories; the first of each may be predicted by the last shared token.
    positions, targets, sequences = [], [], []
    for sequence, (trajectory, start) in enumerate(zip(row, shared + np.cumsum(lengths_S) - lengths_S, strict=True)):
        inputs = shared + int(own_B[trajectory])
        sampled_T = batch.sampled_N[starts_B[trajectory] : starts_B[trajectory] + inputs + 1]
        targets_T = np.flatnonzero(sampled_T[1:]) + 1
        before_T = targets_T - 1
        positions.append(np.where(before_T < shared, before_T, start + before_T - shared))
        targets.append(starts_B[trajectory] + targets_T)
        sequences.append(np.full(len(targets_T), sequence))
    targets_M, sequence_M = np.concatenate(targets), np.concatenate(sequences)
    advantages_M = batch.advantages_B[row][sequence_M]
    if batch.token_advantages_N is not None:
        advantages_M = advantages_M + batch.token_advantages_N[targets_M]
    return MicroBatch(
        token_ids_RL=batch.token_ids_N[tokens_L][None].astype(np.int64),
        position_ids_RL=position_ids_L[None],
        shared=shared,
        lengths_S=lengths_S.astype(np.int32),
        trajectories_S=np.asarray(row, np.int64),
        positions_M=np.concatenate(positions),
        targets_M=batch.token_ids_N[targets_M].astype(np.int64),
        old_logprobs_M=batch.logprobs_N[targets_M],
        advantages_M=advantages_M,
        versions_M=batch.versions_N[targets_M],
        sequence_M=sequence_M,
        teacher_ids_MK=_at(batch.teacher_ids_NK, targets_M).astype(np.int64),
        teacher_logprobs_MK=_at(batch.teacher_logprobs_NK, targets_M).astype(np.float32),
        routes_LXE=None if batch.routes_NXE is None else batch.routes_NXE[tokens_L],
    )


def _at(array_NK: NDArray[Any] | None, targets_M: NDArray[np.int64]) -> NDArray[Any]:
    return np.zeros((len(targets_M), 0)) if array_NK is None else array_NK[targets_M]


EMPTY = MicroBatch(
    token_ids_RL=np.zeros((1, 1), np.int64),
    position_ids_RL=np.zeros((1, 1), np.int64),
    shared=0,
    lengths_S=np.ones(1, np.int32),
    trajectories_S=np.full(1, -1, np.int64),
    positions_M=np.zeros(0, np.int64),
    targets_M=np.zeros(0, np.int64),
    old_logprobs_M=np.zeros(0, np.float32),
    advantages_M=np.zeros(0, np.float32),
    versions_M=np.zeros(0, np.int32),
    sequence_M=np.zeros(0, np.int64),
    teacher_ids_MK=np.zeros((0, 0), np.int64),
    teacher_logprobs_MK=np.zeros((0, 0), np.float32),
)
