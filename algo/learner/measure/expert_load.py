"""Measures how a mixture's routers share the tokens of a minibatch among its experts, and balances them by choice.

The load-balancing value is that of Switch Transformer (arXiv 2101.03961, equations 4 to 6) for k experts a token, as
transformers computes it: E times the sum over experts of f times P, where f is how often a token of a layer is sent to
the expert, and P is the mean probability that the routers give it, both over all tokens of all layers. It is k if the
load is even. Routers that score each expert by a sigmoid (DeepSeek-V3, GLM-4.5) count with their scores divided by
their sum.

Invariants
- It counts the inputs of each trajectory as if it stood alone: a token of the shared beginning of a row counts once for
  each trajectory, filler does not count.
- Neither the division into microbatches nor the number of ranks, whether they share rows or not, changes the value or
  its gradient beyond rounding.
- Layers that are computed again in the backward pass are not counted again.

Shape legend: L tokens of a row, or positions of a rank's part of it, E experts of a layer, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from algo.learner.model.context import Context
from algo.learner.model.experts import MixtureLayer, mixture_of
from algo.learner.pack import MicroBatch


class ExpertLoad:
    """Listens to the routers of a model; for a dense model it measures nothing.

    coef: `LearnerConfig.load_balancing_coef`. context: the ranks that share each row with this one, which counts its
    own positions; None if it has its rows alone.
    """

    def __init__(self, model: nn.Module, coef: float, device: torch.device, context: Context | None = None) -> None:
        self.coef = coef
        self._context = context
        self._layers = mixture_of(model)
        experts = max((layer.count for layer in self._layers), default=0)
        # For each layer and expert: the tokens that were sent there, and the sum of the router's probabilities
        self._counts = torch.zeros(len(self._layers), experts, dtype=torch.float64, device=device)
        self._probs = torch.zeros_like(self._counts)
        self._before: Tensor | None = None  # counts of the whole minibatch, once they are known
        self._weights_L: Tensor | None = None  # of the tokens of the row under way
        self._logits: list[tuple[MixtureLayer, Tensor]] = []
        for index, layer in enumerate(self._layers):
            layer.router.register_forward_hook(partial(self._note, index))

    @contextmanager
    def counted(self, micro: MicroBatch) -> Iterator[None]:
        """Counts the choices of the forward pass inside the block, which is that of this microbatch."""
        if self._layers:
            self._weights_L = self._weights(micro)
        try:
            yield
        finally:
            self._weights_L = None

    def _note(self, index: int, _router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._weights_L is None:
            return
        logits_LE, _, experts_Lk = output
        with torch.no_grad():
            weights_L = self._weights_L
            chosen = weights_L.repeat_interleave(experts_Lk.shape[-1])
            self._counts[index].index_add_(0, experts_Lk.flatten(), chosen)
            # No matrix product: activation checkpointing would keep it as one of the layer's own (`recompute`).
            self._probs[index] += (weights_L[:, None] * _probabilities(self._layers[index], logits_LE)).sum(0)
        if self.coef and torch.is_grad_enabled():
            self._logits.append((self._layers[index], logits_LE))

    def fix(self) -> None:
        """Takes the choices counted so far for those of the whole minibatch, and counts anew. A collective."""
        self._before = self._counts.clone()
        if dist.get_world_size() > 1:
            dist.all_reduce(self._before)
        self._forget()

    def loss(self, micro: MicroBatch) -> Tensor:
        """Returns this microbatch's part of coef times the value, with its gradient, after its forward pass.

        Of a row that ranks share, it is the part of this rank's positions. The parts of a minibatch add up to the whole
        if `fix` has been called, or if there is one part.
        """
        counts_E = (self._counts if self._before is None else self._before).sum(0)
        rows = counts_E.sum() / self._layers[0].per_token
        weights_L = self._weights(micro).float()
        probs_E = sum(weights_L @ _probabilities(layer, logits_LE) for layer, logits_LE in self._logits)
        self._logits.clear()
        return self.coef * len(counts_E) * ((counts_E / rows).float() @ probs_E) / rows.float()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of a minibatch over all ranks, and counts anew; none for a dense model. A collective.

        load_balancing is the value; expert_share_max the largest share of the tokens of a layer that one expert got;
        experts_unused the number of experts, of all layers, that got none.
        """
        if not self._layers:
            return {}
        both = torch.stack([self._counts, self._probs])
        if dist.get_world_size() > 1:
            dist.all_reduce(both)
        self._before = None
        self._forget()
        counts, probs = both.cpu()
        tokens = counts[0].sum() / self._layers[0].per_token
        rows = tokens * len(self._layers)
        value = counts.shape[1] * (counts.sum(0) / rows) @ (probs.sum(0) / rows)
        return {
            "load_balancing": float(value),
            "expert_share_max": float(counts.max() / tokens),
            "experts_unused": float((counts == 0).sum()),
        }

    def _weights(self, micro: MicroBatch) -> Tensor:
        """Returns how many trajectories have each token of the row among their inputs, [L]; 0 for filler."""
        weights_L = np.ones(micro.token_ids_RL.size)
        weights_L[: micro.shared] = micro.sequences
        weights_RL = torch.from_numpy(weights_L * (micro.tokens > 0))[None].to(self._counts.device)
        part = None if self._context is None else self._context.of(weights_RL.shape[1])
        return (weights_RL if part is None else part.of(weights_RL))[0]

    def _forget(self) -> None:
        self._counts.zero_()
        self._probs.zero_()
        self._logits.clear()


def _probabilities(layer: MixtureLayer, logits_LE: Tensor) -> Tensor:
    """Returns the probabilities [L, E] in float32."""
    if not layer.by_sigmoid:
        return logits_LE.float().softmax(-1)
    scores_LE = logits_LE.float().sigmoid()
    return scores_LE / scores_LE.sum(-1, keepdim=True)
