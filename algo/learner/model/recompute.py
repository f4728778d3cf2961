"""Activation checkpointing: what a decoder layer keeps for the backward pass, and what is computed again there.

Each kind keeps the layer's input. What is computed again costs operations that MFU does not count:

    full       nothing else: the whole layer is computed again, but for its last product, which nobody needs
    attention  the outputs of attention and of its four projections: the MLP's two wide products are computed again
    selective  the outputs of attention and of all products: only norms, rotary embeddings and activations are

Invariants
- Gradients are those of a layer that keeps everything, up to rounding.
- Products of adapters are computed again, since they are small and their outputs are as wide as the layer's.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import varlen  # noqa: F401  defines torch_attn::_varlen_attn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

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


def checkpoint_layers(model: PreTrainedModel, config: LearnerConfig) -> None:
    """Makes each decoder layer keep what `LearnerConfig.activation_checkpointing` says, and nothing for "none"."""
    if config.activation_checkpointing == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if config.activation_checkpointing != "full":
        wide = getattr(model.config, "intermediate_size", 0)
        keeps = partial(_policy, wide, config.activation_checkpointing == "selective", config.lora_rank)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keeps)
    model.gradient_checkpointing_enable(options)
    for layer in model.base_model.layers:
        layer.training = True  # transformers asks the layer, not its parts


def _policy(wide: int, keeps_wide: bool, rank: int, _context: Any, operator: Any, *inputs: Any, **_: Any) -> Any:
    """Returns whether an operator's output is kept. This is the interface of `create_selective_checkpoint_contexts`.

    wide: width of the MLP's activations. rank: that of adapters, or 0.
    """
    keeps = operator in ATTENTION or (operator in PRODUCTS and _keeps(inputs[-1], wide, keeps_wide, rank))
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _keeps(weight_IO: Tensor, wide: int, keeps_wide: bool, rank: int) -> bool:
    """Returns whether a product by this weight is kept.

    That which narrows the MLP is its layer's last, so it is not computed again, unless that of its adapter follows.
    """
    inner, outer = weight_IO.shape
    if rank in (inner, outer):
        return False
    if inner == wide:
        return rank > 0
    return keeps_wide or outer not in (wide, 2 * wide)  # some models have both wide products in one
