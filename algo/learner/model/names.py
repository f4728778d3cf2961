"""Gives weights the names that the checkpoint's files have for them, where transformers renames, fuses or turns them.

transformers holds the experts of a layer in two weights; the files, and so vLLM and other programs, have a matrix for
each expert. transformers' own reverse conversion, which its `save_pretrained` uses, says which part of which weight
a tensor of the files is. No list of families is kept here.

Invariant: a tensor of the files is a view of the weight that holds it, so naming the weights takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

from algo.learner.model.lora import BASE


@dataclass(frozen=True, kw_only=True, slots=True)
class Filed:
    """A tensor of the checkpoint's files: where it lies in the weight that holds it."""

    name: str
    """Its name in the files, such as model.layers.0.mlp.experts.3.up_proj.weight."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Elements of the weight from one index to the next, for each dimension."""
    offset: int
    """Elements of the weight before the first."""

    def of(self, weight: Tensor) -> Tensor:
        """Returns this tensor as a view of the whole weight, which is copied only if it is not contiguous."""
        weight = weight.contiguous()
        return weight.as_strided(self.shape, self.stride, weight.storage_offset() + self.offset)


_OF_MODELS: WeakKeyDictionary[nn.Module, dict[str, tuple[Filed, ...]]] = WeakKeyDictionary()


def filed(model: nn.Module) -> dict[str, tuple[Filed, ...]]:
    """Returns the tensors of the checkpoint's files by the weight that holds them.

    model: may be on the meta device, sharded, or have adapters, which are left out.

    Raises ValueError for a weight of which the files hold something else than parts.
    """
    if model not in _OF_MODELS:
        _OF_MODELS[model] = _filed(model)
    return _OF_MODELS[model]


def _filed(model: nn.Module) -> dict[str, tuple[Filed, ...]]:
    weights = {
        name.replace(BASE, ""): torch.empty(weight.shape, device="meta")
        for name, weight in model.named_parameters()
        if ".lora_" not in name
    }
    names = {id(weight): name for name, weight in weights.items()}
    with _AsViews():
        tensors = revert_weight_conversion(model, dict(weights))
    parts: dict[str, list[Filed]] = {name: [] for name in weights}
    for name, tensor in tensors.items():
        holder = names.get(id(tensor if tensor._base is None else tensor._base))
        if holder is not None:
            parts[holder].append(
                Filed(name=name, shape=tuple(tensor.shape), stride=tensor.stride(), offset=int(tensor.storage_offset()))
            )
    for name, held in parts.items():
        if sum(torch.Size(part.shape).numel() for part in held) != weights[name].numel():
            raise ValueError(
                f"its weight {name} is no collection of tensors of a checkpoint's files, so replicas would not find "
                "it. Fix: take a model whose weights transformers only renames, stacks or joins"
            )
    return {name: tuple(held) for name, held in parts.items()}


class _AsViews(TorchFunctionMode):
    """Makes `contiguous` return the tensor itself, so that what a conversion cuts out of a weight stays a view of it.

    The weights are on the meta device, where nothing reads the memory.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def by_file(model: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in the files, tensor) for whole weights of a model, by its own names, in their order."""
    parts = filed(model)
    for name, weight in weights:
        for part in parts[name]:
            yield part.name, part.of(weight)
