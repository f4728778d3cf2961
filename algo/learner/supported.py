"""Which models can be trained: what cannot is refused when it is loaded, by name and with what to do instead.

Promises
- `check_structure` needs the model's shape alone, so it refuses before a weight is read.
- What it lets through gives a trajectory in a packed row the log-probabilities that it has alone, and its weights leave
  under the names that the checkpoint's files have for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange

# What transformers' models do to the head's output, which `Scorer` takes as it is; None or 1 does nothing.
LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def check_structure(model: PreTrainedModel) -> None:
    """Raises ValueError for a model, which may be on the meta device, that cannot be trained."""
    kind = model.config.model_type
    if expert := next(_experts(model), None):
        raise ValueError(
            f"{kind!r} is a mixture of experts ({expert}), which the learner cannot train: transformers keeps the "
            "experts' weights fused, so replicas would not find them. Fix: take a dense model"
        )
    if not isinstance(getattr(model.base_model, "layers", None), nn.ModuleList):
        raise ValueError(
            f"{kind!r} ({type(model.base_model).__name__}) has no list 'layers' of decoder layers, by which the "
            "learner shards a model. Fix: take a model that is built like Llama or Qwen"
        )
    if changes := [name for name in LOGIT_CHANGES if getattr(model.config, name, None) not in (None, 1)]:
        raise ValueError(
            f"its {changes[0]} changes the logits, which the learner does not know. Fix: take a model without it"
        )
    if mixing := [name for name, module in model.named_modules() if isinstance(module, nn.Conv1d)]:
        raise ValueError(
            f"its {mixing[0]} would run on from one trajectory of a row into the next. Fix: take a model whose layers "
            "are all attention"
        )


def check_names(model: PreTrainedModel, source: Path) -> None:
    """Raises ValueError where transformers has given weights other names than the checkpoint's files have.

    A base model's files, whose names only lack the prefix, are let through: replicas know both.
    """
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    if all(isinstance(each, PrefixChange) for each in conversions):
        return
    filed: set[str] = set()
    for file in source.glob("*.safetensors"):
        with safe_open(file, framework="pt") as content:
            filed.update(content.keys())
    if renamed := {name for name, _ in model.named_parameters()} - filed:
        raise ValueError(
            f"its weights would leave under other names than they have in its files, {min(renamed)} first: replicas "
            f"would not find them. Fix: take a model of another family than {model.config.model_type!r}"
        )


def _experts(model: nn.Module) -> Iterator[str]:
    """Names of the modules that hold a layer's experts."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts" or type(module).__name__.endswith("Experts"):
            yield name
