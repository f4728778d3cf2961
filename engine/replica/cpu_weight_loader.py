"""Loads weights straight into a model on the CPU, where vLLM's own way would copy most of them three times.

vLLM's layerwise reload builds each layer anew, copies the weights into it, packs them for the kernels and copies the
rest into the old tensors. Here a linear layer is packed from the memory that was received, and everything else is
copied in place. That is enough for some models (MODELS); the others take vLLM's way.

Invariant: after `finish` every weight of the model is the new one. A missing or unknown weight raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

# The weights of these are renamed and stacked by `packed_modules_mapping`, and need nothing more.
MODELS = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter, and the Hugging Face weights that make it up, row after row."""

    names: tuple[str, ...]
    module: nn.Module
    parameter: str


def fits(model: nn.Module, device: torch.device, *, processes: int) -> bool:
    """Returns whether `Direct` can load the model. processes: those that share its layers (tensor parallelism).

    It cannot with several, which take parts of the weights, and with zentorch, whose kernels keep the memory that they
    are given instead of a packed copy.
    """
    alone = device.type == "cpu" and processes == 1
    return alone and type(model).__name__ in MODELS and find_spec("zentorch") is None


class Direct:
    """Loads weights by any number of calls of `load`, then one of `finish`. dtype: the model's."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._head = model.lm_head
        self._targets = {name: target for target in _targets(model) for name in target.names}
        self._missing = set(self._targets)
        self._parts: dict[str, Tensor] = {}  # parts of incomplete targets

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            target = self._targets.get(name)
            if target is None:
                raise RuntimeError(f"the model has no weight {name}")
            self._parts[name] = weight
            if all(part in self._parts for part in target.names):
                self._fill(target, [self._parts.pop(part) for part in target.names])
                self._missing.difference_update(target.names)

    def finish(self) -> None:
        if self._missing:
            raise RuntimeError(f"{len(self._missing)} weights are missing, {min(self._missing)} among them")
        _pack(self._head)

    def _fill(self, target: Target, parts: list[Tensor]) -> None:
        module, shape = target.module, (sum(map(len, parts)), *parts[0].shape[1:])
        parameter = getattr(module, target.parameter)
        packed = isinstance(module, LinearBase) and target.parameter == "weight"
        expected = (module.output_size, module.input_size) if packed else tuple(parameter.shape)
        if isinstance(module, VocabParallelEmbedding):
            expected = (module.org_vocab_size, *expected[1:])  # the rest is padding
        if shape != expected:
            raise RuntimeError(f"{target.names} have shape {shape}, the model has {expected}")
        if packed:
            module.weight = nn.Parameter(_joined(parts).to(self._dtype), requires_grad=False)
            _pack(module)
            if module.weight.numel():  # it was not packed, and the received memory will go away
                module.weight.data = module.weight.data.clone()
            return
        for rows, part in zip(parameter.data[: shape[0]].split([len(part) for part in parts]), parts, strict=True):
            rows.copy_(part)


def _pack(module: nn.Module) -> None:
    """Makes the kernels' copy of the weights. The old copy is freed first, so that the new one gets its memory."""
    module.cpu_linear = None
    module.quant_method.process_weights_after_loading(module)


def _targets(model: nn.Module) -> list[Target]:
    embedded = {id(module.weight) for module in model.modules() if type(module) is VocabParallelEmbedding}
    targets = []
    for path, module in model.named_modules():
        if isinstance(module, ParallelLMHead) and id(module.weight) in embedded:
            continue  # it is tied: its weight comes under the embedding's name
        parent, _, leaf = path.rpartition(".")
        leaves = model.packed_modules_mapping.get(leaf, [leaf])
        for name, _ in module.named_parameters(recurse=False):
            names = tuple(".".join(filter(None, (parent, part, name))) for part in leaves)
            targets.append(Target(names, module, name))
    return targets


def _joined(parts: list[Tensor]) -> Tensor:
    """Returns the parts one below the other, without a copy if they already lie so in memory."""
    ends = [part.data_ptr() + part.nbytes for part in parts]
    together = all(part.data_ptr() == end for part, end in zip(parts[1:], ends, strict=False))
    same = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    if not (together and same):
        return torch.cat(parts)
    first = parts[0]
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
