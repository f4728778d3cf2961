"""Counts the floating-point operations that a training step needs, whatever is done to save memory.

A matrix of n weights costs 2 n per token forward, 2 n for the gradient of its input and 2 n for its own gradient, which
a frozen one does not have: 6 N per token, 4 N under adapters. The head is needed at targets only. Causal attention of a
trajectory with l tokens costs 2 l^2 heads width per layer forward (half of the square) and twice that backward. In a
mixture of experts a token costs the weights of the router, of the experts that it is sent to and of shared ones: its
active parameters. What is recomputed (activations, logits) does not count. Source of the first terms: PaLM (arXiv
2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from algo.learner.model.experts import mixture_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Operations per token, per target and per squared length of a trajectory.

    >>> Cost(token=6e3, target=600.0, square=1.0).of(targets=5, lengths=[10, 20])
    183500.0
    """

    token: float
    target: float
    square: float

    def of(self, *, targets: int, lengths: Sequence[int]) -> float:
        squares = sum(float(length) ** 2 for length in lengths)
        return self.token * sum(lengths) + self.target * targets + self.square * squares


def cost_of(model: PreTrainedModel) -> Cost:
    """Returns the cost of a decoder that is not sharded yet.

    Its matrices are those of its linear layers, of its routers and, as many as a token is sent to, of its experts.
    """
    config, head = model.config, _of_linear_layers(model.get_output_embeddings())
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    mixture = mixture_of(model)
    routers = sum(_of_matrices(layer.router.parameters()) for layer in mixture)
    experts = sum(_of_stacked(layer.experts.parameters()) * layer.per_token / layer.count for layer in mixture)
    return Cost(
        token=float(_of_linear_layers(model) - head + routers + experts),
        target=float(head),
        square=6.0 * config.num_hidden_layers * config.num_attention_heads * width,
    )


def _of_linear_layers(module: nn.Module) -> int:
    """Returns the operations per token of its linear layers; an adapter has layers of its own."""
    return _of_matrices(layer.weight for layer in module.modules() if isinstance(layer, nn.Linear))


def _of_stacked(weights: Iterable[Tensor]) -> int:
    """Returns the operations per token of the matrices of all experts, which lie in one weight; not of their biases."""
    return _of_matrices(weight for weight in weights if weight.ndim > 2)


def _of_matrices(weights: Iterable[Tensor]) -> int:
    """Returns the operations per token of these matrices; not of biases."""
    return sum(weight.numel() * (6 if weight.requires_grad else 4) for weight in weights if weight.ndim > 1)
