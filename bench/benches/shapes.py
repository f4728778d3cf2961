"""Shapes of models that benches make with random weights, as fields of transformers' configurations.

It imports neither torch nor transformers, since processes that fork engines read it too.
"""

from __future__ import annotations

from typing import Any

_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size"),
)
_SHAPES = {
    "small": (128, 2, 4, 2, 32, 256),
    "small-moe": (128, 2, 4, 2, 32, 256),
    "135m": (576, 30, 9, 3, 64, 1536),  # as SmolLM2-135M
    "30m": (512, 8, 8, 4, 64, 1536),
    "qwen3-1.7b": (2048, 28, 16, 8, 128, 6144),
    "qwen3-4b": (2560, 36, 32, 8, 128, 9728),
    "14b-8l": (5120, 8, 40, 8, 128, 17408),  # Qwen3-14B with 8 of its 40 layers
    "30b-a3b-4l": (2048, 4, 32, 4, 128, 6144),  # Qwen3-30B-A3B with 4 of its 48 layers
}
_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_EXPERTS = {
    "small-moe": (8, 2, 64),
    "30b-a3b-4l": (128, 8, 768),
}


def is_mixture(shape: str) -> bool:
    return shape in _EXPERTS


def fields_of(shape: str) -> dict[str, Any]:
    """Returns the kind of model and its sizes, to which a vocabulary is still to be added.

    >>> fields_of("small-moe")["model_type"], fields_of("small-moe")["num_experts"]
    ('qwen3_moe', 8)
    """
    fields: dict[str, Any] = dict(zip(_SIZES, _SHAPES[shape], strict=True))
    if is_mixture(shape):
        return {"model_type": "qwen3_moe", **fields, **dict(zip(_OF_EXPERTS, _EXPERTS[shape], strict=True))}
    return {"model_type": "qwen3", **fields}
