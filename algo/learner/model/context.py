"""Shares a row over the ranks of a group: each holds a part of its positions, and inside attention some of its heads.

Every layer but attention works on single positions, so a rank computes it for its own part of the row alone. Before
attention the ranks exchange parts of positions for parts of heads, so that each has all positions of its heads, and
after it they change back (DeepSpeed-Ulysses, arXiv 2309.14509). PyTorch's own context parallelism
(torch.distributed.tensor.experimental) sends keys around a ring, for one causal sequence: it knows neither trajectories
that lie side by side, nor a shared beginning, nor a window. Heads are independent, so here attention itself stays as it
is.

Invariants
- Every rank of a group gives the same rows, and gets the scores of the whole row.
- Gradients of the ranks add up to that of the row. A rank's own is that of what it computed.
- Filler fills the last parts up to equal size; nothing that is scored sees it.

Shape legend: C ranks of a group, L tokens of a row, P positions of a rank, H heads, h heads of a rank, D width of a
head, M positions with loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from algo.learner.config import divisors

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_heads(config: PretrainedConfig, context_parallel: int) -> None:
    """Raises ValueError for a model whose query heads cannot be shared equally by this many ranks."""
    heads = config.num_attention_heads
    if heads % context_parallel:
        raise ValueError(
            f"LearnerConfig.context_parallel must divide the {heads} query heads of the model, got {context_parallel}. "
            f"Fix: {divisors(heads)}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """A rank's place among the ranks that share its rows."""

    group: dist.ProcessGroup
    rank: int
    ranks: int

    def of(self, length: int) -> RowPart:
        """Returns this rank's part of a row of `length` tokens."""
        return RowPart(context=self, length=length)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPart:
    """A rank's part of a row: P positions in order, of which the last parts may hold filler."""

    context: Context
    length: int

    @property
    def positions(self) -> int:
        """Returns P, which is the same on all ranks of the group."""
        return -(-self.length // self.context.ranks)

    @property
    def start(self) -> int:
        return self.context.rank * self.positions

    @property
    def tokens(self) -> int:
        """Returns how many of the positions are tokens of the row; the others are filler."""
        return min(max(self.length - self.start, 0), self.positions)

    def of(self, row_RL: Tensor) -> Tensor:
        """Returns this rank's part of values of positions, [R, P]; filler is 0."""
        own = row_RL[:, self.start : self.start + self.positions]
        return pad(own, (0, self.positions - self.tokens))

    def own(self, positions_M: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns which of these positions of the row are in this rank's part, as indices on the M axis."""
        return np.flatnonzero((positions_M >= self.start) & (positions_M < self.start + self.positions))

    def whole(self, values: Tensor, own: Tensor, count: int) -> Tensor:
        """Returns the values of all ranks, [count, ...]. own: where this rank's stand in them. A collective."""
        gathered: Tensor = _Gather.apply(values, own, count, self.context.group)
        return gathered

    def by_heads(self, query_1HPD: Tensor, key_1HPD: Tensor, value_1HPD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all positions [1, h, L, D] of this rank's heads. Three collectives.

        Where heads of keys are fewer than ranks, several ranks get the same one.
        """
        index = _key_heads(query_1HPD.shape[1], key_1HPD.shape[1], self.context.ranks)
        if index is not None:
            index_H = torch.tensor(index, device=key_1HPD.device)
            key_1HPD, value_1HPD = (states.index_select(1, index_H) for states in (key_1HPD, value_1HPD))
        query, key, value = (self._all_positions(states) for states in (query_1HPD, key_1HPD, value_1HPD))
        return query, key, value

    def own_heads(self, values_H: Tensor) -> Tensor:
        """Returns this rank's part of values of the heads of queries."""
        return values_H.chunk(self.context.ranks)[self.context.rank]

    def _all_positions(self, states_1HPD: Tensor) -> Tensor:
        parts_CPhD = states_1HPD[0].unflatten(0, (self.context.ranks, -1)).transpose(1, 2)
        row_LhD = _Exchange.apply(parts_CPhD, self.context.group).flatten(0, 1)[: self.length]
        return row_LhD.transpose(0, 1)[None]

    def by_positions(self, output_1LhD: Tensor) -> Tensor:
        """Returns all heads [1, P, H, D] of this rank's positions. A collective."""
        filler = self.context.ranks * self.positions - self.length
        parts_CPhD = pad(output_1LhD[0], (0, 0, 0, 0, 0, filler)).unflatten(0, (self.context.ranks, -1))
        heads_CPhD = _Exchange.apply(parts_CPhD, self.context.group)
        return heads_CPhD.transpose(0, 1).flatten(1, 2)[None]


def _key_heads(queries: int, keys: int, ranks: int) -> list[int] | None:
    """Returns which heads of keys the ranks take, one rank after another; None if each takes as many of its own.

    >>> _key_heads(8, 4, 2), _key_heads(8, 2, 4), _key_heads(6, 3, 2)
    (None, [0, 0, 1, 1], [0, 0, 1, 1, 2, 2])
    """
    if keys % ranks == 0:
        return None
    taken = ranks if ranks % keys == 0 else queries  # else each head of queries gets its own
    return [head * keys // taken for head in range(taken)]


class _Exchange(torch.autograd.Function):
    """Sends part i of [C, ...] to rank i, and returns what the ranks sent, in their order; so does its gradient.

    It is c10d's own collective: two functional ones at a time corrupt the heap with gloo.
    """

    @staticmethod
    def forward(ctx: Any, parts_C: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(parts_C, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grads[0], ctx.group), None


def _exchanged(parts_C: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent_C = parts_C.contiguous()
    received_C = torch.empty_like(sent_C)
    dist.all_to_all_single(received_C, sent_C, group=group)
    return received_C


class _Gather(torch.autograd.Function):
    """Gathers values of all ranks on each. A rank's gradient is that of its own: each computes the same loss of all."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        whole = values.new_zeros(count, *values.shape[1:]).index_copy_(0, own, values)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return grads[0].index_select(0, own), None, None, None
