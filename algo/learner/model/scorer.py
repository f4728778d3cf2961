"""The model as the trainer sees it: log-probabilities and entropies at chosen positions.

Invariants
- No tensor of logits has more than LOGIT_ROWS rows, unless all logits are fewer than KEPT_LOGITS.
- With `fp32_head` logits are products of the same bf16 hidden states and weights, multiplied and kept in fp32.
- Activation checkpointing and offload and the kind of attention change results only by rounding.

Shape legend: R = 1 row of L tokens, M positions with loss, J tokens that are scored at each, V vocabulary, H hidden
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from algo.learner.model.attention import bounds
from algo.learner.model.context import Context
from algo.learner.model.routing import ARGUMENT, RowRoutes

# Rows of logits at once; with a vocabulary of 150k in fp32 that is 0.6 GB, and it is recomputed in the backward pass.
LOGIT_ROWS = 1024
# Fewer logits in all are kept for the backward pass, since recomputing them would cost more than 64 MB is worth.
KEPT_LOGITS = 1 << 24


class Scorer(nn.Module):
    """Computes log-probabilities and entropies. It is the FSDP root, so that the head runs on gathered weights."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        fp32_head: bool = False,
        activation_offload: bool = False,
        context: Context | None = None,
    ) -> None:
        """context: the ranks that share each row with this one; None if it has its rows alone."""
        super().__init__()
        self.model = model
        self.fp32_head = fp32_head
        self.activation_offload = activation_offload
        self.context = context

    def forward(
        self,
        token_ids_RL: Tensor,
        position_ids_RL: Tensor,
        lengths: Sequence[int],
        positions_M: NDArray[np.int64],
        targets_M: Tensor,
        shared: int = 0,
        routes: RowRoutes | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns log p(targets_M) in fp32, and the (detached) entropy there, both [M].

        targets_M: one token for each position, or several as [M, J]; the log-probabilities have its shape. lengths:
        those of the row's trajectories. shared: how many tokens at the row's beginning all of them continue.
        Ranks that share the row are all given the whole of it. routes: the sampler's for this rank's positions.
        """
        device, count = token_ids_RL.device, len(targets_M)
        arguments = bounds(lengths, device, shared)
        if routes is not None:
            arguments[ARGUMENT] = routes
        part = None if self.context is None else self.context.of(token_ids_RL.shape[1])
        if part is not None:
            arguments["row_part"] = part
            token_ids_RL, position_ids_RL = part.of(token_ids_RL), part.of(position_ids_RL)
            own = part.own(positions_M)
            positions_M = positions_M[own] - part.start
            own_M = torch.from_numpy(own).to(device)
            targets_M = targets_M.index_select(0, own_M)
        with self._kept_activations(device):
            hidden_RLH = self.model.base_model(
                input_ids=token_ids_RL,
                position_ids=position_ids_RL,
                use_cache=False,
                **arguments,
            ).last_hidden_state
        hidden_MH = hidden_RLH.flatten(0, 1).index_select(0, torch.as_tensor(positions_M).to(device))
        recompute = len(targets_M) * self.model.config.vocab_size > KEPT_LOGITS
        score = partial(checkpoint, _score, use_reentrant=False) if recompute else _score
        score = partial(score, self._head())
        chunks = zip(hidden_MH.split(LOGIT_ROWS), targets_M.split(LOGIT_ROWS), strict=True)
        logprobs, entropies = zip(*(score(*chunk) for chunk in chunks), strict=True)
        scores = torch.cat(logprobs), torch.cat(entropies)
        if part is None:
            return scores
        logprobs_M, entropies_M = (part.whole(each, own_M, count) for each in scores)
        return logprobs_M, entropies_M

    def _kept_activations(self, device: torch.device) -> AbstractContextManager[None]:
        """Chooses where layers keep what the backward pass needs: with checkpointing, their inputs."""
        if not self.activation_offload:
            return nullcontext()
        return save_on_cpu(pin_memory=device.type != "cpu")

    def _head(self) -> Callable[[Tensor], Tensor]:
        """Returns the function from hidden states to logits. In fp32 its weights are cast once a pass, not a chunk."""
        head: nn.Module = self.model.get_output_embeddings()
        if not self.fp32_head:
            return head
        weights = {name: weight.float() for name, weight in head.named_parameters()}
        return lambda hidden_MH: functional_call(head, weights, hidden_MH.float())


def _score(head: Callable[[Tensor], Tensor], hidden_MH: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
    return LogProb.apply(head(hidden_MH), targets_M)


class LogProb(torch.autograd.Function):
    """Computes (log p(targets), entropy_M) of logits_MV in fp32; the entropy carries no gradient.

    targets: [M], or [M, J] for several tokens of each position; the log-probabilities have their shape.

    It overwrites logits that are fp32. Two tensors of [M, V] exist at once, and the probabilities are kept: a third of
    what log_softmax and a separate entropy would touch.
    """

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits_MV = logits_MV.float()
        # Relative to the largest logit a likely token's log-probability is small, so no digits cancel.
        logits_MV -= logits_MV.amax(-1, keepdim=True)
        probs_MV = logits_MV.exp()
        sum_M1 = probs_MV.sum(-1, keepdim=True)
        probs_MV /= sum_M1
        log_sum_M = sum_M1.log().squeeze(-1)
        targets_MJ = targets if targets.dim() == 2 else targets[:, None]
        logprobs_MJ = logits_MV.gather(-1, targets_MJ) - log_sum_M[:, None]
        # A matrix product, since the elementwise product would be a third tensor.
        entropy_M = log_sum_M - torch.bmm(probs_MV[:, None], logits_MV[:, :, None]).flatten()
        ctx.save_for_backward(probs_MV, targets_MJ)
        ctx.mark_non_differentiable(entropy_M)
        return logprobs_MJ.reshape(targets.shape), entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        probs_MV, targets_MJ = ctx.saved_tensors
        grad_MJ = grads[0].reshape(targets_MJ.shape)
        return (probs_MV * -grad_MJ.sum(-1, keepdim=True)).scatter_add_(1, targets_MJ, grad_MJ), None
