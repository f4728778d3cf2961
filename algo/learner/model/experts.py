"""Finds the parts of a mixture of experts in a transformers model: a router and fused experts in some of its layers.

transformers holds the experts of a layer in parameters whose first dimension is the expert. The module beside them is
the router, which returns (logits [L, E], weights [L, k], experts [L, k]) for L tokens.

Shape legend: L tokens, E experts of a layer, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureLayer:
    """The mixture of one decoder layer."""

    layer: int
    """Number of the decoder layer, from 0; dense layers are left out."""
    name: str
    """Name of the module of the experts in the model, such as model.layers.0.mlp.experts."""
    router: nn.Module
    experts: nn.Module
    count: int
    """Experts of the layer, without shared ones, which every token goes through."""
    per_token: int
    """Experts that a token is sent to."""


def mixture_of(model: nn.Module) -> list[MixtureLayer]:
    """Returns the layers of a transformers model that are mixtures of experts, in order; none for a dense model.

    Raises ValueError for experts without a router beside them.
    """
    return [_layer(model, name, experts) for name, experts in _experts(model)]


def _layer(model: nn.Module, name: str, experts: nn.Module) -> MixtureLayer:
    block = model.get_submodule(name.rpartition(".")[0])
    routers = [each for each in block.children() if hasattr(each, "top_k") and each is not experts]
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(routers) != 1 or not numbers:
        raise ValueError(
            f"{name} ({type(experts).__name__}) has no router beside it that says how many experts a token takes "
            "(top_k), so the learner cannot train this mixture. Fix: take a mixture that is built like Qwen3-MoE"
        )
    [router] = routers
    weight = next(experts.parameters())
    return MixtureLayer(
        layer=numbers[0], name=name, router=router, experts=experts, count=len(weight), per_token=int(router.top_k)
    )


def _experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts" or type(module).__name__.endswith("Experts"):
            yield name, module
