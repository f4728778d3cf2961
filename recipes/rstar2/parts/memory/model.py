"""Reads the numbers of a model that decide its memory: its configuration, and parameters that transformers counts."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from algo.learner.model.attention import PACKED, bounds, register
from algo.learner.model.experts import mixture_of
from algo.learner.model.supported import check_structure, empty
from recipes.rstar2.parts.memory.public import PUBLIC

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")  # layers of a mixture that get adapters


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """The numbers of a mixture of experts, which are the same in each of its layers."""

    layers: int
    """Layers with experts; the others are dense."""
    experts: int
    """Experts of a layer, without shared ones."""
    per_token: int
    """Experts that a token is sent to."""
    width: int
    """Intermediate size of an expert."""
    matrices: int
    """Parameters of all matrices of a layer's experts, which are sharded by whole experts."""
    shared: int
    """Intermediate size of the experts that every token goes through; 0 where there are none."""
    gated: bool
    """Whether the output of shared experts is multiplied by a gate."""
    score_bytes: int
    """Bytes of a number in the outputs of experts once they are weighed: 4 if the router's weights are float32."""
    router_bytes: int
    """Bytes of a number in the router: 4 if it computes in float32."""
    biased: bool
    """Whether experts have biases and clamp their wide tensors (gpt-oss)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The numbers of a decoder."""

    layers: int
    hidden: int
    intermediate: int
    """Intermediate size of dense layers."""
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    positions: int
    parameters: int
    layer_parameters: int
    """Parameters of the largest layer; embeddings, head and last norm are in no layer."""
    root_parameters: int
    """Parameters that are in no layer."""
    tied: bool
    """Whether the head's weights are the embeddings'."""
    norms_queries: bool
    """Whether queries and keys have norms of their own."""
    float_norms: bool
    """Whether norms multiply by their weights in float32."""
    copies_heads: bool
    """Whether rotary embeddings join each head of parts, so that heads lie one after another: those that turn a part of
    a head alone, and gpt-oss's."""
    linear: Mapping[str, int]
    """Parameters of an adapter of rank 1, by the name of the linear layer that it would be added to. In a mixture
    these are attention's alone."""
    mixture: Mixture | None = None

    @property
    def queries(self) -> int:
        """Returns the width of the queries of all heads."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """Returns the width of the keys of all heads, which is that of the values."""
        return self.key_heads * self.head_width

    @property
    def head(self) -> int:
        """Returns the number of parameters of the head, which the embeddings have too."""
        return self.vocabulary * self.hidden

    @property
    def dense_layers(self) -> int:
        return self.layers - (self.mixture.layers if self.mixture else 0)

    @property
    def experts(self) -> int:
        """Returns the number of parameters of the experts of all layers."""
        return self.mixture.layers * self.mixture.matrices if self.mixture else 0

    @property
    def active(self) -> int:
        """Returns the number of parameters that compute a token."""
        if self.mixture is None:
            return self.parameters
        unused = self.experts - self.experts * self.mixture.per_token // self.mixture.experts
        return self.parameters - unused

    def adapter_width(self, targets: Sequence[str]) -> int:
        """Returns the parameters of the adapters of the layers with these names, for each unit of their rank."""
        return sum(width for name, width in self.linear.items() if any(_named(name, target) for target in targets))

    def adapted(self, targets: Sequence[str]) -> tuple[str, ...]:
        """Returns those of the names that some layer has that can get an adapter."""
        return tuple(target for target in targets if any(_named(name, target) for name in self.linear))


def _named(layer: str, target: str) -> bool:
    return f".{layer}".endswith(f".{target}")


def configuration(name: str) -> PretrainedConfig:
    """Returns the configuration of a model: a name in PUBLIC, a folder, a config.json or an id of the hub.

    Raises ValueError.
    """
    known = {each.lower(): fields for each, fields in PUBLIC.items()}
    if name.lower() in known:
        fields = dict(known[name.lower()])
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    if not Path(name).exists() and "/" not in name:
        raise ValueError(
            f"model: {name!r} is no folder, no config.json and none of {', '.join(PUBLIC)}. Fix: one of these names, a "
            "folder, or an id of the hub such as Qwen/Qwen3-14B"
        )
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        cause = " ".join(str(error).split())
        raise ValueError(f"model: {name!r} has no config.json that can be read ({cause}). Fix: model=DIR") from error


def model_of(name: str) -> Model:
    """Returns the numbers of a model. Raises ValueError where there is none, or where the learner cannot train it."""
    config = configuration(name)
    register()
    try:
        model = empty(config, PACKED)
        check_structure(model)
        _check_attention(model)
    except ValueError as error:
        raise ValueError(f"model: {error}") from error
    layers = model.base_model.layers
    sizes = [_parameters(layer) for layer in layers]
    parameters = _parameters(model)
    return Model(
        layers=len(layers),
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        head_width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        parameters=parameters,
        layer_parameters=max(sizes),
        root_parameters=parameters - sum(sizes),
        tied=bool(config.tie_word_embeddings),
        float_norms="input_layernorm" in (getattr(model, "_keep_in_fp32_modules", None) or ()),
        norms_queries=hasattr(getattr(layers[0], "self_attn", None), "q_norm"),
        copies_heads=config.model_type == "gpt_oss"
        or (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1) != 1,
        linear=_linear(model),
        mixture=_mixture(model),
    )


def _check_attention(model: PreTrainedModel) -> None:
    """Raises ValueError for a model whose attention needs what packed attention does not have."""
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    with torch.no_grad(), suppress(RuntimeError):  # without numbers in memory it gets as far as the kernel
        model.base_model(input_ids=ids, position_ids=ids, use_cache=False, **bounds([2], ids.device))


def _parameters(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _linear(model: PreTrainedModel) -> dict[str, int]:
    """Returns inputs and outputs of each linear layer but the head; of a mixture, those of attention alone."""
    kept = ATTENTION if mixture_of(model) else ("",)
    return {
        name: sum(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings() and name.endswith(kept)
    }


def _mixture(model: PreTrainedModel) -> Mixture | None:
    """Returns the numbers of the first layer of a mixture, or None for a dense model."""
    layers = mixture_of(model)
    if not layers:
        return None
    first, hidden = layers[0], model.config.hidden_size
    matrices = sum(weight.numel() for weight in first.experts.parameters() if weight.ndim == 3)
    block = model.get_submodule(first.name.rpartition(".")[0])
    shared = [module.weight for module in block.modules() if isinstance(module, nn.Linear)]
    tokens = torch.empty(2, hidden, dtype=torch.bfloat16, device="meta")
    logits_LE, weights_Lk, _ = copy.deepcopy(first.router).to(torch.bfloat16)(tokens)
    return Mixture(
        layers=len(layers),
        experts=first.count,
        per_token=first.per_token,
        width=matrices // (3 * first.count * hidden),
        matrices=matrices,
        shared=sum(weight.numel() for weight in shared) // (3 * hidden),
        gated=any(len(weight) == 1 for weight in shared),
        score_bytes=weights_Lk.element_size(),
        router_bytes=logits_LE.element_size(),
        biased=first.biased,
    )
