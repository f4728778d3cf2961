"""Reads the numbers of a model that decide its memory: its configuration, and parameters that transformers counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from algo.learner.model.supported import check_structure, empty

# Values of their config.json on Hugging Face's hub, so that nothing has to be downloaded to ask whether they fit.
PUBLIC: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-7B-Instruct": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "Qwen3-1.7B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "Qwen3-32B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "Qwen3-14B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The numbers of a dense decoder."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    positions: int
    parameters: int
    layer_parameters: int
    """Parameters of one layer; embeddings, head and last norm are in no layer."""
    tied: bool
    """Whether the head's weights are the embeddings'."""
    norms_queries: bool
    """Whether queries and keys have norms of their own."""

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
    def root_parameters(self) -> int:
        """Returns the number of parameters that are in no layer."""
        return self.parameters - self.layers * self.layer_parameters

    @property
    def adapter_width(self) -> int:
        """The parameters of the adapters of all projections of one layer, for each unit of their rank."""
        return 7 * self.hidden + 2 * self.queries + 2 * self.keys + 3 * self.intermediate


def configuration(name: str) -> PretrainedConfig:
    """Returns the configuration of a model: a name in PUBLIC, a folder, a config.json or an id of the hub.

    Raises ValueError.
    """
    known = {each.lower(): fields for each, fields in PUBLIC.items()}
    if name.lower() in known:
        fields = dict(known[name.lower()])
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    if not Path(name).exists() and "/" not in name:
        raise ValueError(f"model: {name!r} is no folder, no config.json and none of {', '.join(PUBLIC)}")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        cause = " ".join(str(error).split())
        raise ValueError(f"model: {name!r} has no config.json that can be read ({cause}). Fix: model=DIR") from error


def model_of(name: str) -> Model:
    """Returns the numbers of a model. Raises ValueError where there is none, or where the learner cannot train it."""
    config = configuration(name)
    try:
        model = empty(config, "sdpa")
        check_structure(model)
    except ValueError as error:
        raise ValueError(f"model: {error}") from error
    layers = model.base_model.layers
    return Model(
        layers=len(layers),
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        head_width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        parameters=sum(weight.numel() for weight in model.parameters()),
        layer_parameters=sum(weight.numel() for weight in layers[0].parameters()),
        tied=bool(config.tie_word_embeddings),
        norms_queries=hasattr(getattr(layers[0], "self_attn", None), "q_norm"),
    )
