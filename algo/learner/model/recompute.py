"""Activation checkpointing: what a decoder layer keeps for the backward pass, and what is computed again there.

Each kind keeps the layer's input. What is computed again costs operations that MFU does not count:

    full       nothing else: the whole layer is computed again, but for its last product, which nobody needs
    attention  the outputs of attention and of its four projections: the MLP's two wide products are computed again
    selective  the outputs of attention and of all products: only norms, rotary embeddings and activations are

In a mixture of experts, "attention" and "selective" keep the router's logits too, so that each token goes to the same
experts again. "selective" keeps the outputs of the grouped products of the experts, for each token as many rows as it
has experts; "attention" computes these and the wide products of shared experts again. Where experts have biases
(gpt-oss), which are added to these outputs in place, "selective" computes the grouped products again too.

Invariants
- Gradients are those of a layer that keeps everything, up to rounding.
- Products of adapters are computed again, since they are small and their outputs are as wide as the layer's.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen  # noqa: F401  defines torch_attn::_varlen_attn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.integrations import moe  # noqa: F401  defines transformers::grouped_mm_fallback

from algo.learner.model.experts import mixture_of

if TYPE_CHECKING:
    from algo.learner.config import LearnerConfig

ATTENTION = frozenset(
    {
        torch.ops.torch_attn._varlen_attn.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)
PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})
# The products of all experts of a layer with the tokens that were sent to each.
GROUPED = frozenset({torch.ops.aten._grouped_mm.default, torch.ops.transformers.grouped_mm_fallback.default})


def checkpoint_layers(model: PreTrainedModel, config: LearnerConfig) -> None:
    """Makes each decoder layer keep what `LearnerConfig.activation_checkpointing` says, and nothing for "none"."""
    if config.activation_checkpointing == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if config.activation_checkpointing != "full":
        wide = config.activation_checkpointing == "selective"
        grouped = wide and not any(layer.biased for layer in mixture_of(model))
        keeps = partial(_policy, _widths(model), wide, grouped, config.lora_rank)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keeps)
    model.gradient_checkpointing_enable(options)
    for layer in model.base_model.layers:
        layer.training = True  # transformers asks the layer, not its parts


def _widths(model: PreTrainedModel) -> frozenset[int]:
    """Returns the widths of activations in MLPs: that of dense layers, and those of experts, shared or not."""
    widths = {getattr(model.config, "intermediate_size", 0)}
    for layer in mixture_of(model):
        block = model.get_submodule(layer.name.removesuffix(".experts"))
        widths |= {size for module in block.modules() if isinstance(module, nn.Linear) for size in module.weight.shape}
        widths |= {getattr(layer.experts, name, 0) for name in ("intermediate_dim", "intermediate_size")}
    return frozenset(widths - {0, 1, model.config.hidden_size})


def _policy(
    widths: frozenset[int],
    keeps_wide: bool,
    keeps_grouped: bool,
    rank: int,
    _context: Any,
    operator: Any,
    *inputs: Any,
    **_: Any,
) -> Any:
    """Returns whether an operator's output is kept. This is the interface of `create_selective_checkpoint_contexts`.

    widths: those of the MLPs' activations. keeps_wide: whether their wide products are kept, keeps_grouped: whether
    those of experts are. rank: that of adapters, or 0.
    """
    keeps = operator in ATTENTION or (operator in GROUPED and keeps_grouped)
    keeps = keeps or (operator in PRODUCTS and _keeps(inputs[-1], widths, keeps_wide, rank))
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _keeps(weight_IO: Tensor, widths: frozenset[int], keeps_wide: bool, rank: int) -> bool:
    """Returns whether a product by this weight is kept.

    That which narrows the MLP is its layer's last, so it is not computed again, unless that of its adapter follows.
    """
    inner, outer = weight_IO.shape
    if rank in (inner, outer):
        return False
    if inner in widths:
        return rank > 0
    return keeps_wide or not (outer in widths or outer / 2 in widths)  # some models have both wide products in one
