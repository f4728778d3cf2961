"""Low-rank adapters through peft: they alone are trained, and leave the learner merged or alone.

Invariants
- A weight with an adapter leaves as W + scaling B A in fp32 under the name that the base model has for it. So neither
  checkpoints nor replicas know of adapters, unless the adapter alone is published (`adapters`).
- An adapter begins as zero: the first weights are those of the checkpoint.

peft is imported only if adapters are wanted, since that takes two seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from algo.learner.model.experts import mixture_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from algo.learner.config import LearnerConfig

BASE = ".base_layer"  # peft's name for the layer that an adapter wraps
ADAPTER = "default"
ATTENTION = "q_proj,k_proj,v_proj,o_proj"


def add_adapters(model: PreTrainedModel, config: LearnerConfig) -> None:
    """Wraps the layers named in `lora_targets` and freezes everything else.

    Raises ValueError for a name without a layer, for the embeddings and a head tied to them, which leave unmerged, and
    for a mixture's experts and routers.
    """
    from peft import LoraConfig, inject_adapter_in_model

    for target in config.lora_targets:  # peft ignores a name without a layer if another name has one
        if why := _refusal(model, target):
            raise ValueError(f"LearnerConfig.lora_targets must not hold {target!r}, {why}, got {config.lora_targets}")
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=list(config.lora_targets))
    inject_adapter_in_model(lora, model, ADAPTER)


def _refusal(model: PreTrainedModel, target: str) -> str:
    """Returns why the layers of this name get no adapters; "" if they do."""
    layers = [layer for name, layer in model.named_modules() if f".{name}".endswith(f".{target}")]
    embedded = model.get_input_embeddings().weight
    if any(getattr(layer, "weight", None) is embedded for layer in layers):
        return "which holds the embeddings"
    mixture = mixture_of(model)
    routed = [part for layer in mixture for part in (layer.experts, layer.router)]
    if layers and not any(layer in routed for layer in layers):
        return ""
    if not mixture:
        return "which names no layer"
    return f"since experts, whose weights are fused, and routers get no adapters (name layers such as {ATTENTION})"


@contextmanager
def without_adapters(scorer: nn.Module) -> Iterator[None]:
    """Makes adapters add exactly 0 inside, so that the model computes what it did before they were added."""
    layers = [module for module in scorer.modules() if hasattr(module, "lora_A")]
    scalings = [layer.scaling[ADAPTER] for layer in layers]
    for layer in layers:
        layer.scaling[ADAPTER] = 0.0
    try:
        yield
    finally:
        for layer, scaling in zip(layers, scalings, strict=True):
            layer.scaling[ADAPTER] = scaling


def adapters(scorer: nn.Module, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, weight) of the adapters, named as by peft behind the scorer's prefix. whole: as in `merged`."""
    for name, weight in scorer.named_parameters():
        if ".lora_" in name:
            yield name.replace(f".{ADAPTER}.", "."), whole(weight)


def peft_settings(config: LearnerConfig) -> str:
    """Returns what a file of adapters needs beside it to be loaded: peft's adapter_config.json."""
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": list(config.lora_targets),
        "bias": "none",
    }
    return json.dumps(fields)


def merged(scorer: nn.Module, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name without wrapping, weight) for each parameter of the base model. whole: gathers one, collectively."""
    for name, weight in scorer.named_parameters():
        if ".lora_" in name:
            continue
        if f"{BASE}.weight" not in name:
            yield name.replace(BASE, ""), whole(weight)
            continue
        layer = scorer.get_submodule(name.removesuffix(f"{BASE}.weight"))
        up, down = (whole(part[ADAPTER].weight).float() for part in (layer.lora_B, layer.lora_A))
        yield name.replace(BASE, ""), whole(weight).float().addmm(up, down, alpha=layer.scaling[ADAPTER])
