"""Loads a checkpoint into the model in training: rank 0 reads it once, and scatters it over all ranks in fp32."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from algo.learner.measure.flops import Cost, cost_of
from algo.learner.model.attention import activate, register
from algo.learner.model.context import Context, check_heads
from algo.learner.model.experts import freeze_routers
from algo.learner.model.lora import add_adapters
from algo.learner.model.recompute import checkpoint_layers
from algo.learner.model.routing import follow_routes
from algo.learner.model.scorer import Scorer
from algo.learner.model.sharding import copies_of, shard
from algo.learner.model.supported import check_names, check_scores, check_structure, check_tied, empty

if TYPE_CHECKING:
    from algo.learner.config import LearnerConfig

# Functions that PyTorch computes by MKL's vector functions on the CPU.
VECTOR_FUNCTIONS = ["acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p"]
VECTOR_FUNCTIONS += ["log2", "sin", "sqrt", "tan", "tanh"]


def choose_device(name: str) -> torch.device:
    """Returns this rank's device: the GPU of its number on the machine. Raises ValueError if there is none."""
    if name == "cpu":
        return torch.device(name)
    number, there = dist.get_node_local_rank(fallback_rank=0), torch.cuda.device_count()
    if number >= there:
        where = f"rank {number} of a machine with {there} GPUs"
        raise ValueError(f"LearnerConfig.device must be 'cpu' for {where}, got {name!r}")
    torch.cuda.set_device(number)
    return torch.device(name, number)


def load(config: LearnerConfig, source: Path, context: Context | None = None) -> tuple[Scorer, Cost]:
    """Returns the checkpoint's model in fp32, sharded over all ranks, and what a pass costs.

    Every rank builds the model without memory (the meta device) and shards it. Rank 0 reads the weights into host
    memory, so that a machine holds one whole copy; each weight goes to its shards and is then freed, so that a GPU
    never holds more than its shards and one weight.

    context: the ranks that share rows (`algo.learner.model.sharding.context_of`).

    Raises OSError or ValueError for a checkpoint, a model (`algo.learner.model.supported`) or names that do not fit.
    """
    _settle_vector_functions()
    register()
    if config.flash_attention != "FA2":
        activate(config.flash_attention, config.device)
    transformers_logging.disable_progress_bar()
    model = empty(AutoConfig.from_pretrained(source, trust_remote_code=False), config.attention)
    check_structure(model)
    check_heads(model.config, config.context_parallel)
    whole = _whole(source, config) if dist.get_rank() == 0 else {}
    model.eval()  # no dropout, as in the sampler
    if config.lora_rank:
        with torch.device("meta"):
            add_adapters(model, config)
    freeze_routers(model, config)
    checkpoint_layers(model, config)
    mixtures = follow_routes(model)
    if config.replay_routing and not mixtures:
        raise ValueError(
            f"LearnerConfig.replay_routing must be False for {model.config.model_type!r}, which is no mixture of "
            f"experts, got {config.replay_routing!r}"
        )
    cost = cost_of(model)
    scorer = Scorer(model, fp32_head=config.fp32_head, activation_offload=config.activation_offload, context=context)
    scorer = shard(scorer, config)
    scorer.to_empty(device=choose_device(config.device))
    scatter(scorer, whole)
    return scorer, cost


def _whole(source: Path, config: LearnerConfig) -> dict[str, Tensor]:
    """Returns the checkpoint's weights and constants in host memory, by the scorer's names, with new adapters."""
    model = read(source, config.attention)
    if config.lora_rank:
        add_adapters(model, config)
    parts = [*model.named_parameters(prefix="model"), *model.named_buffers(prefix="model")]
    return {name: part.detach() for name, part in parts}


def read(source: Path, attention: str) -> PreTrainedModel:
    """Returns the whole model with the checkpoint's weights, in fp32 on the CPU. Raises as `load` does."""
    _settle_vector_functions()
    model, report = AutoModelForCausalLM.from_pretrained(
        source,
        trust_remote_code=False,
        use_safetensors=True,
        dtype=torch.float32,
        attn_implementation=attention,
        output_loading_info=True,
    )
    if missing := report["missing_keys"]:  # transformers fills them with random numbers
        raise ValueError(f"holds no weight {min(missing)} ({len(missing)} are missing)")
    check_names(model, source)
    check_tied(model)
    check_scores(model, attention, Scorer)
    return model


@torch.no_grad()
def scatter(scorer: Scorer, whole: dict[str, Tensor]) -> None:
    """Gives rank 0's weights and constants to all ranks, each rank its shard, one weight at a time.

    FSDP shards the first dimension into equal parts, except the last ones, which may be shorter or empty.

    whole: both by name, in host memory; it is empty afterwards. The other ranks give an empty one.
    """
    copies = copies_of(scorer)
    ranks = dist.get_world_size() // copies
    for name, weight in scorer.named_parameters():
        part = weight.to_local()
        if ranks == copies == 1:
            part.copy_(whole.pop(name))
            continue
        rows = -(-len(weight) // ranks)
        parts = None  # those of the weight before are freed
        own = part.new_empty(rows, *part.shape[1:])
        if whole:
            padded = own.new_zeros(ranks * rows, *own.shape[1:])
            padded[: len(weight)] = whole.pop(name)
            parts = [*padded.split(rows)] * copies
            del padded
        dist.scatter(own, parts, src=0)
        part.copy_(own[: len(part)])
    for name, constant in scorer.named_buffers():  # those too that no file holds: the frequencies of rotary embeddings
        if whole:
            constant.copy_(whole.pop(name))
        dist.broadcast(constant, src=0)


@cache
def _settle_vector_functions() -> None:
    """Calls each vector function once, in one thread.

    MKL 2024.2, which PyTorch is built with, chooses a function's code at its first call. If two threads make that call
    together, one of them may get a coarse variant for its share (pytorch issue 188792): cosines were wrong by 1.5e-4 in
    one learner of some thousand, and log-probabilities by 1.4e-3.
    """
    for dtype in (torch.float32, torch.float64):
        for name in VECTOR_FUNCTIONS:
            getattr(torch.full((1,), 0.5, dtype=dtype), name)()
