"""Notes the learner's values of single tokens, for the rows that somebody who looks at a run asks for.

`logprobs` and `entropy` are those of the forward pass that the update is made of. `logprob_gradient` is minus the
derivative of the loss by the token's log-probability, times the minibatch's tokens: for PPO the advantage times the
ratio, and 0 where that was clipped. `minibatch` is the number of the minibatch in its step, from 0: in 0 the forward pass
ran under the weights before the step, in a later one after the updates of those before it. All are NaN where there was
no loss.

Shape legend: B sequences of a batch, N tokens of the rows asked for, M positions with loss of a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from algo.learner.pack import MicroBatch

NAMES = ("logprobs", "entropy", "logprob_gradient", "minibatch")


class TokenNotes:
    """Collects the notes of some rows (ascending) of a batch with these lengths, one row after another.

    minibatch: the number of the one that is under way.
    """

    def __init__(self, lengths_B: NDArray[np.int32], rows: Sequence[int]) -> None:
        self.minibatch = 0
        lengths = lengths_B[list(rows)]
        self._starts_B = np.full(len(lengths_B), -1, np.int64)
        self._starts_B[list(rows)] = np.cumsum(lengths) - lengths
        self._values = torch.zeros(len(NAMES), int(lengths.sum()))
        self._seen_N = torch.zeros(int(lengths.sum()))

    def add(self, micro: MicroBatch, logprobs_M: Tensor, entropy_M: Tensor, *, scale: float) -> None:
        """Notes a microbatch after its backward pass. scale: the factor for the gradient of logprobs_M."""
        starts_M = self._starts_B[micro.trajectories_S[micro.sequence_M]]
        chosen = np.flatnonzero(starts_M >= 0)
        places = starts_M[chosen] + micro.position_ids_RL.flat[micro.positions_M[chosen]] + 1
        logprob_gradient_M = torch.zeros_like(logprobs_M) if logprobs_M.grad is None else -scale * logprobs_M.grad
        minibatch_M = torch.full_like(entropy_M, self.minibatch)
        columns = (logprobs_M.detach(), entropy_M.detach(), logprob_gradient_M, minibatch_M)
        values = torch.stack(columns).float().cpu()
        self._values[:, torch.from_numpy(places)] = values[:, torch.from_numpy(chosen)]
        self._seen_N[torch.from_numpy(places)] = 1

    def gathered(self, world_size: int) -> dict[str, NDArray[np.float32]]:
        """Returns the notes of all ranks, each [N]. A collective."""
        if world_size > 1:
            dist.all_reduce(self._values)
            dist.all_reduce(self._seen_N)
        self._values[:, self._seen_N == 0] = torch.nan
        return dict(zip(NAMES, self._values.numpy(), strict=True))
