"""Locates where a step went wrong: the rank that has the microbatch or token reports it to all.

Invariant: an update that is refused is refused by every rank with the same message, before it touches the weights.

Shape legend: M positions with loss of a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from algo.learner.pack import MicroBatch
from algo.loss.interface import fresh


class Diverged(RuntimeError):
    """Loss or gradient is not finite. The weights have the updates of earlier minibatches, which it counts."""


class Mismatched(RuntimeError):
    """Learner and sampler disagree beyond the tolerance about what the same weights sampled; no update was made."""


NONE = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPlace:
    """A token of a batch, which ranks can exchange as a tensor."""

    difference: float = -1.0
    """|learner - sampler|; below 0 if there is no token."""
    micro: int = NONE
    """Number of the microbatch on its rank, or NONE."""
    trajectory: int = NONE
    """Place of its trajectory in the batch; NONE if no single token is to blame."""
    position: int = 0
    """Place in the trajectory."""
    turn: int = 0
    """Number of the turn, from 1."""
    learner: float = 0.0
    sampler: float = 0.0
    advantage: float = 0.0

    @classmethod
    def of(cls, index: int, micro: MicroBatch, logprobs_M: Tensor, at: int) -> TokenPlace:
        """Describes target `at` of microbatch `index`. A turn is a run of targets without a gap."""
        own = np.flatnonzero(micro.sequence_M[: at + 1] == micro.sequence_M[at])
        position_ids = micro.position_ids_RL.flat[micro.positions_M[own]]
        learner, sampler = float(logprobs_M[at]), float(micro.old_logprobs_M[at])
        return cls(
            difference=abs(learner - sampler),
            micro=index,
            trajectory=int(micro.trajectories_S[micro.sequence_M[at]]),
            position=int(position_ids[-1]) + 1,
            turn=1 + int((np.diff(position_ids) > 1).sum()),
            learner=learner,
            sampler=sampler,
            advantage=float(micro.advantages_M[at]),
        )

    def to_tensor(self) -> Tensor:
        return torch.tensor(astuple(self), dtype=torch.float64)

    @classmethod
    def from_tensor(cls, row: Tensor) -> TokenPlace:
        values = dict(zip((field.name for field in fields(cls)), row.tolist(), strict=True))
        for name in ("micro", "trajectory", "position", "turn"):
            values[name] = int(values[name])
        return cls(**values)

    def __str__(self) -> str:
        return (
            f"trajectory {self.trajectory} of the batch, position {self.position} (turn {self.turn}): the "
            f"learner says {self.learner:.6f}, the sampler {self.sampler:.6f}, advantage {self.advantage:.6g}"
        )


def worst_mismatch(micros: Sequence[MicroBatch], logprobs: Sequence[Tensor], live: int) -> TokenPlace:
    """Returns the token of all ranks on which the sampler, with the `live` weights, and the learner differ most."""
    worst = TokenPlace()
    for index, (micro, logprobs_M) in enumerate(zip(micros, logprobs, strict=True)):
        sequence_M, versions_M = torch.from_numpy(micro.sequence_M), torch.from_numpy(micro.versions_M)
        fresh_M = fresh(sequence_M, micro.sequences, versions_M, live)
        difference_M = (logprobs_M.cpu() - torch.from_numpy(micro.old_logprobs_M)).abs().masked_fill(~fresh_M, -1.0)
        if len(difference_M) and difference_M.max() > worst.difference:
            worst = TokenPlace.of(index, micro, logprobs_M, int(difference_M.argmax()))
    return max(_of_all_ranks(worst), key=lambda place: place.difference)


def mismatch_mean(micros: Sequence[MicroBatch], logprobs: Sequence[Tensor], live: int) -> float:
    """Returns the mean |learner - sampler| over the tokens of all ranks that the `live` weights sampled. A collective.

    It is 0 if there is no such token.
    """
    added = torch.zeros(2, dtype=torch.float64)
    for micro, logprobs_M in zip(micros, logprobs, strict=True):
        sequence_M, versions_M = torch.from_numpy(micro.sequence_M), torch.from_numpy(micro.versions_M)
        fresh_M = fresh(sequence_M, micro.sequences, versions_M, live)
        difference_M = (logprobs_M.cpu() - torch.from_numpy(micro.old_logprobs_M)).abs()[fresh_M]
        added += torch.stack([difference_M.double().sum(), fresh_M.sum().double()])
    if dist.get_world_size() > 1:
        dist.all_reduce(added)
    total, tokens = added.tolist()
    return total / tokens if tokens else 0.0


def first_not_finite(micros: Sequence[MicroBatch], logprobs: Sequence[Tensor], losses: Sequence[float]) -> str:
    """Describes the first microbatch of the first rank whose loss or whose tokens are not finite."""
    broken = TokenPlace()
    for index, (micro, logprobs_M) in enumerate(zip(micros, logprobs, strict=True)):
        inputs = logprobs_M.cpu(), torch.from_numpy(micro.old_logprobs_M), torch.from_numpy(micro.advantages_M)
        broken_M = ~torch.stack([values_M.isfinite() for values_M in inputs]).all(0)
        if broken_M.any():
            broken = TokenPlace.of(index, micro, logprobs_M, int(broken_M.int().argmax()))
        elif not np.isfinite(losses[index]):
            broken = TokenPlace(micro=index)
        else:
            continue
        break
    for rank, place in enumerate(_of_all_ranks(broken)):
        if place.micro != NONE:
            token = f", {place}" if place.trajectory != NONE else ""
            return f"first in microbatch {place.micro + 1} of {len(micros)} on rank {rank}{token}"
    return "every microbatch's loss is finite, the gradient is not"


def _of_all_ranks(place: TokenPlace) -> list[TokenPlace]:
    own = place.to_tensor()
    rows = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return [TokenPlace.from_tensor(row) for row in rows]
