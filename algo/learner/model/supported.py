"""Decides which models can be trained; others are refused when they are loaded, with a name and a remedy.

Invariants
- `check_structure` needs the model's shape alone, so it refuses before a weight is read.
- `check_scores` measures on the loaded model that a trajectory in a packed row has the log-probabilities that the model
  itself gives it alone. It uses the model's own code at full depth, so no list of families has to be kept, and it
  shares the loaded weights, so it takes no second copy of them; rank 0 does it before the weights are sharded.
- The weights of accepted models leave under the names that the checkpoint's files have for them.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from algo.learner.config import check_quantized
from algo.learner.model.attention import PACKED
from algo.learner.model.experts import checked_routers, mixture_of
from algo.learner.model.names import Filed, filed

# Allowed difference in nats between a row and each trajectory alone. Of some fifty families, random and small in
# float32, those that are scored right differ by 1e-6 to 1e-5 (rounding), those that are scored wrong by 4e-3 and more.
APART = 1e-3
# Fields of a configuration that limit how far back a layer looks. The measurement sets each of them to WINDOW, so that
# some tokens go beyond it.
WINDOWS = ("sliding_window", "local_attention", "attention_chunk_size", "window_size")
WINDOW = 8
LENGTHS = (2 * WINDOW + 3, 5)
# Two experts of a token may score so nearly alike that rounding chooses; then other tokens are measured.
DRAWS = 3
# Where a kernel needs a GPU, "sdpa" replaces it, which tells trajectories apart by the positions of tokens as well.
ON_CPU = (PACKED, "sdpa", "eager")
# Their frequencies depend on the longest trajectory of a row, so a short one beside it would get those of the long one.
ROPES_OF_THE_ROW = ("dynamic", "longrope")


def empty(source: PretrainedConfig, attention: str) -> PreTrainedModel:
    """Builds the model without memory for its weights. Raises ValueError if it does not support this attention."""
    try:
        return _on_meta(source, attention)
    except Exception as error:
        check_structure(_on_meta(source, "eager"))
        raise ValueError(
            f"{source.model_type!r} cannot be built with attention {attention!r} ({_one_line(error)}). Fix: "
            "LearnerConfig(attention='sdpa'), or another model"
        ) from error


def _on_meta(source: PretrainedConfig, attention: str, experts: str | None = None) -> PreTrainedModel:
    """experts: how experts compute; None: by grouped products where PyTorch has them, as the learner does."""
    kinds = {"attn_implementation": attention, "experts_implementation": experts}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(source, dtype=torch.float32, **kinds)


def check_structure(model: PreTrainedModel) -> None:
    """Raises ValueError for a model, which may be on the meta device, that cannot be trained."""
    kind = model.config.model_type
    if not isinstance(getattr(model.base_model, "layers", None), nn.ModuleList):
        raise ValueError(
            f"{kind!r} ({type(model.base_model).__name__}) has no list 'layers' of decoder layers, by which the "
            "learner shards a model. Fix: take a model that is built like Llama or Qwen"
        )
    check_quantized(model.config.to_dict())
    mixture_of(model)
    if rope := next((rope for rope in _ropes(model.config) if rope in ROPES_OF_THE_ROW), None):
        raise ValueError(
            f"its rope_type {rope!r} depends on the longest trajectory of a row, so the others would be scored wrong. "
            "Fix: take a model whose frequencies are fixed (rope_type 'default', 'linear', 'yarn' or 'llama3')"
        )


def _ropes(config: PretrainedConfig) -> Iterator[str]:
    """Yields the kinds of rotary embeddings: the model's, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *rope.values()):
        if isinstance(each, dict) and "rope_type" in each:
            yield each["rope_type"]


def check_tied(model: PreTrainedModel) -> None:
    """Raises ValueError if the configuration ties the head to the embeddings, but the files hold another head."""
    head, embedded = model.get_output_embeddings(), model.get_input_embeddings()
    tied = model.config.tie_word_embeddings and head is not None
    if tied and getattr(head, "weight", None) is not embedded.weight:
        name = next(name for name, module in model.named_modules() if module is head)
        raise ValueError(
            f"config.json sets tie_word_embeddings to true, but {name}.weight in the files is another. "
            f"Fix: set tie_word_embeddings to false, or take {name}.weight out of the files"
        )


@torch.no_grad()
def check_scores(model: PreTrainedModel, attention: str, scorer: Callable[[PreTrainedModel], nn.Module]) -> None:
    """Raises ValueError if the learner would give a trajectory other log-probabilities than the model does.

    A row of two trajectories of random ids, the first of which goes beyond two windows, is scored as the learner scores
    it, and compared with the model's own logits of each alone, with transformers' plain attention and plain loop over
    experts. A model that is scored wrong is trained wrong, and supervised training has no sampler that would notice.

    model: loaded in float32 on the CPU. scorer: makes the learner's `Scorer` of a model.
    """
    config = copy.deepcopy(model.config)
    for name in WINDOWS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, WINDOW)
    weights = _strong(model)
    own = _on_meta(copy.deepcopy(config), "eager", experts="eager").eval()
    learners = scorer(empty(config, attention if attention in ON_CPU else "sdpa")).eval()
    for seed in range(DRAWS if mixture_of(model) else 1):
        ids = torch.randint(config.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))
        with checked_routers(own):
            alone = [_alone(own, weights, ids_T) for ids_T in ids.split(LENGTHS)]
        apart = _apart(learners, weights, ids.split(LENGTHS), alone)
        if apart <= APART:
            return
    each = zip(ids.split(LENGTHS), alone, strict=True)
    apart_alone = max(_apart(learners, weights, [ids_T], [alone_T]) for ids_T, alone_T in each)
    if apart_alone <= APART:
        why = "one trajectory of a row changes another"
    else:
        why = "its head does more than multiply, or its attention is not the learner's"
    raise ValueError(
        f"{config.model_type!r} gives a trajectory in a row a log-probability that is {apart:.2g} nats "
        f"from the one that it has alone (at most {APART:g}): {why}. Fix: learner.attention=sdpa, which is checked the "
        "same way, else another model"
    )


def _alone(own: PreTrainedModel, weights: dict[str, Tensor], ids_T: Tensor) -> Tensor:
    """Returns the log-probabilities of ids_T[1:] by the model's own forward pass."""
    try:
        logits_TV = functional_call(own, weights, (), {"input_ids": ids_T[None, :-1], "use_cache": False}).logits[0]
    except Exception as error:
        raise _not_tried(own, error) from error
    logprobs_T: Tensor = logits_TV.float().log_softmax(-1).gather(-1, ids_T[1:, None]).squeeze(-1)
    return logprobs_T


def _apart(learners: nn.Module, weights: dict[str, Tensor], row: Sequence[Tensor], alone: Sequence[Tensor]) -> float:
    """Returns the largest difference of a log-probability; infinite if one is not a number."""
    inputs = [ids_T[:-1] for ids_T in row]
    lengths = [len(ids_T) for ids_T in inputs]
    positions_L = torch.cat([torch.arange(length) for length in lengths])
    targets_M = torch.cat([ids_T[1:] for ids_T in row])
    arguments = (torch.cat(inputs)[None], positions_L[None], lengths, np.arange(len(targets_M)), targets_M)
    try:
        logprobs_M, _ = functional_call(learners, {f"model.{name}": each for name, each in weights.items()}, arguments)
    except ValueError:
        raise
    except Exception as error:
        raise _not_tried(learners.model, error) from error
    apart = float((logprobs_M - torch.cat(list(alone))).abs().max())
    return math.inf if math.isnan(apart) else apart


def _not_tried(model: PreTrainedModel, error: Exception) -> ValueError:
    return ValueError(
        f"{model.config.model_type!r} cannot score {sum(LENGTHS)} tokens as the learner does ({_one_line(error)}). "
        "Fix: take a model that is built like Llama or Qwen"
    )


def _strong(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the model's weights and constants, with those of a layer that hardly acts made larger.

    A checkpoint that has not been trained may begin with weights so small that no error of a layer would show. Weights
    of a usual size, and so those of any large model, are shared and not copied.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    fused = {f"{layer.name}.{part}" for layer in mixture_of(model) for part, _ in layer.experts.named_parameters()}
    for name, weight in model.named_parameters():
        size = float(torch.linalg.vector_norm(weight)) / math.sqrt(weight.numel())
        usual = 1 / math.sqrt(weight.shape[-1])
        if (weight.ndim == 2 or name in fused) and 0 < size < usual / 2:
            tensors[name] = weight * (usual / size)
    return tensors


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def check_names(model: PreTrainedModel, source: Path) -> None:
    """Raises ValueError if weights would leave otherwise than the checkpoint's files have them.

    Names and shapes of all are compared, and the values of what transformers cuts out of the first weight of each kind.
    A base model's files, whose names only lack the prefix, are accepted, since replicas know both.

    model: loaded from source.
    """
    kind = model.config.model_type
    places = {name: file for file in source.glob("*.safetensors") for name in _names_in(file)}
    parts = filed(_on_meta(model.config, "eager"))
    prefix = f"{model.base_model_prefix}."
    if renamed := {
        part.name
        for each in parts.values()
        for part in each
        if part.name not in places and part.name.removeprefix(prefix) not in places
    }:
        raise ValueError(
            f"its weights would leave under other names than they have in its files, {min(renamed)} first: replicas "
            f"would not find them. Fix: take a model of another family than {kind!r}, or files that its own "
            "save_pretrained wrote"
        )
    of_kinds = {re.sub(r"\d+", "N", name): name for name in reversed(parts) if _converted(name, parts[name])}
    for name in of_kinds.values():
        weight = model.get_parameter(name).detach()
        for part in parts[name]:
            own_name = part.name if part.name in places else part.name.removeprefix(prefix)
            with safe_open(places[own_name], framework="pt") as content:
                own = content.get_tensor(own_name)
            if own.shape != part.shape or not torch.equal(own.to(weight.dtype), part.of(weight)):
                raise ValueError(
                    f"{part.name} would leave with other values than it has in its files: replicas would compute with "
                    f"them. Fix: take a model of another family than {kind!r}"
                )


def _converted(name: str, parts: Sequence[Filed]) -> bool:
    return [part.name for part in parts] != [name]


def _names_in(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as content:
        return list(content.keys())
