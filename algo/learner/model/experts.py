"""Finds the parts of a mixture of experts in a transformers model: a router and fused experts in some of its layers.

transformers holds the experts of a layer in parameters whose first dimension is the expert. The module beside them is
the router, which returns (logits [L, E], weights [L, k], experts [L, k]) for L tokens.

Shape legend: L tokens, E experts of a layer, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from algo.learner.config import LearnerConfig


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
    biased: bool
    """Whether experts have biases, which transformers adds to the outputs of their products in place (gpt-oss)."""
    by_sigmoid: bool
    """Whether each expert's score is a sigmoid of its logit, and the choice corrected by a bias (DeepSeek-V3); else the
    scores are a softmax."""


def mixture_of(model: nn.Module) -> list[MixtureLayer]:
    """Returns the layers of a transformers model that are mixtures of experts, in order; none for a dense model.

    Raises ValueError for experts without a router beside them.
    """
    return [_layer(model, name, experts) for name, experts in _experts(model)]


def freeze_routers(model: nn.Module, config: LearnerConfig) -> None:
    """Freezes the routers if `LearnerConfig.train_router` is False. Raises ValueError for options without a mixture."""
    mixture = mixture_of(model)
    if not mixture and (not config.train_router or config.load_balancing_coef):
        name, value = ("load_balancing_coef", 0) if config.train_router else ("train_router", True)
        raise ValueError(f"LearnerConfig.{name} must be {value} for a dense model, got {getattr(config, name)}")
    if not config.train_router:
        for layer in mixture:
            layer.router.requires_grad_(False)


@contextmanager
def checked_routers(model: nn.Module) -> Iterator[None]:
    """Raises ValueError if a router in a forward pass inside the block does not return what this file says."""
    mixture = mixture_of(model)
    outputs: dict[str, Any] = {}

    def keep(name: str, _router: nn.Module, _inputs: Any, output: Any) -> None:
        outputs[name] = output

    hooks = [layer.router.register_forward_hook(partial(keep, layer.name)) for layer in mixture]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for layer in mixture:
        if not _is_routing(layer, outputs.get(layer.name)):
            raise ValueError(
                f"the router beside {layer.name} ({type(layer.router).__name__}) does not return its logits and the "
                "experts of each token, so the learner cannot train this mixture. Fix: take a mixture that is built "
                "like Qwen3-MoE"
            )


def _is_routing(layer: MixtureLayer, output: Any) -> bool:
    if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(each, Tensor) for each in output):
        return False
    logits_LE, weights_Lk, experts_Lk = output
    chosen = (len(logits_LE), layer.per_token)
    shapes = [each.shape == chosen for each in (weights_Lk, experts_Lk)]
    return logits_LE.shape[1:] == (layer.count,) and all(shapes) and not experts_Lk.is_floating_point()


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
    return MixtureLayer(
        layer=numbers[0],
        name=name,
        router=router,
        experts=experts,
        count=len(next(experts.parameters())),
        per_token=int(router.top_k),
        biased=any(weight.ndim == 2 for weight in experts.parameters()),
        by_sigmoid=any(hasattr(each, "e_score_correction_bias") for each in (block, router)),
    )


def _experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts" or type(module).__name__.endswith("Experts"):
            yield name, module
