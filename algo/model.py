"""The model under training as the trainer sees it: log-probabilities at chosen positions, sharded with FSDP2.

Invariants
- Master weights and the reduction of gradients are fp32; `LearnerConfig.dtype` is what the passes compute in.
- No tensor of logits has more than LOGIT_ROWS rows, unless all of them are fewer than KEPT_LOGITS.
- Activation checkpointing, the kind of attention and the sharding change results only by rounding.

Shape legend: R = 1 row of L tokens, M positions with loss, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import WeightConverter
from transformers.utils import logging as transformers_logging

from algo.attention import bounds, register
from algo.flops import Cost, cost_of
from algo.lora import add_adapters

if TYPE_CHECKING:
    from algo.learner_config import LearnerConfig

# Rows of logits at once; with a vocabulary of 150k in fp32 that is 0.6 GB, and it is recomputed in the backward pass.
LOGIT_ROWS = 1024
# What transformers' models do to the head's output, which `Scorer` takes as it is; None or 1 does nothing.
LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
# What PyTorch hands to MKL's vector functions on the CPU.
VECTOR_FUNCTIONS = ["acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p"]
VECTOR_FUNCTIONS += ["log2", "sin", "sqrt", "tan", "tanh"]
# Below this many logits in all they are kept for the backward pass: recomputing would cost more than 64 MB is worth.
KEPT_LOGITS = 1 << 24


class Scorer(nn.Module):
    """Log-probabilities and entropies at chosen positions; the FSDP root, so that the head runs on gathered weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        token_ids_RL: Tensor,
        position_ids_RL: Tensor,
        lengths: Sequence[int],
        positions_M: Tensor,
        targets_M: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """log p(targets_M) in fp32, and the (detached) entropy there, both [M]. lengths: of the row's trajectories."""
        hidden_RLH = self.model.base_model(
            input_ids=token_ids_RL,
            position_ids=position_ids_RL,
            use_cache=False,
            **bounds(lengths, token_ids_RL.device),
        ).last_hidden_state
        hidden_MH = hidden_RLH.flatten(0, 1).index_select(0, positions_M)
        recompute = len(targets_M) * self.model.config.vocab_size > KEPT_LOGITS
        score = partial(checkpoint, self._score, use_reentrant=False) if recompute else self._score
        chunks = zip(hidden_MH.split(LOGIT_ROWS), targets_M.split(LOGIT_ROWS), strict=True)
        logprobs, entropies = zip(*(score(*chunk) for chunk in chunks), strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score(self, hidden_MH: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
        return LogProb.apply(self.model.get_output_embeddings()(hidden_MH), targets_M)


class LogProb(torch.autograd.Function):
    """(log p(targets_M), entropy_M) of logits_MV in fp32; the entropy carries no gradient.

    Of [M, V] the probabilities alone are kept: a third of what log_softmax and an entropy beside it touch.
    """

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
        logits_MV = logits_MV.float()
        # Relative to the largest logit, where a likely token's log-probability is small: no digits cancel.
        largest_M1 = logits_MV.amax(-1, keepdim=True)
        probs_MV = (logits_MV - largest_M1).exp_()
        sum_M1 = probs_MV.sum(-1, keepdim=True)
        probs_MV /= sum_M1
        logprobs_M = (logits_MV.gather(-1, targets_M[:, None]) - largest_M1 - sum_M1.log()).squeeze(-1)
        entropy_M = (largest_M1 + sum_M1.log()).squeeze(-1) - torch.linalg.vecdot(probs_MV, logits_MV)
        ctx.save_for_backward(probs_MV, targets_M)
        ctx.mark_non_differentiable(entropy_M)
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads_M: Tensor) -> tuple[Tensor, None]:
        probs_MV, targets_M = ctx.saved_tensors
        grad_M1 = grads_M[0][:, None]
        return (probs_MV * -grad_M1).scatter_add_(1, targets_M[:, None], grad_M1), None


def choose_device(name: str) -> torch.device:
    """This rank's device: the GPU of its number on the machine. Raises ValueError where there is none."""
    if name == "cpu":
        return torch.device(name)
    number, there = dist.get_node_local_rank(fallback_rank=0), torch.cuda.device_count()
    if number >= there:
        where = f"rank {number} of a machine with {there} GPUs"
        raise ValueError(f"LearnerConfig.device must be 'cpu' for {where}, got {name!r}")
    torch.cuda.set_device(number)
    return torch.device(name, number)


def load(config: LearnerConfig, source: Path) -> tuple[Scorer, Cost]:
    """The checkpoint in fp32, sharded over all ranks, and what a pass costs.

    Raises OSError or ValueError for a checkpoint or names that do not fit.
    """
    register()
    transformers_logging.disable_progress_bar()
    wanted = {"dtype": torch.float32, "attn_implementation": config.attention, "output_loading_info": True}
    model, found = AutoModelForCausalLM.from_pretrained(source, **wanted)
    model.eval()  # the sampler drops nothing
    if missing := found["missing_keys"]:  # the library has made random numbers of them
        raise ValueError(f"holds no weight {min(missing)} ({len(missing)} are missing)")
    if joined := [each for each in model._weight_conversions if isinstance(each, WeightConverter)]:
        names = f"{joined[0].target_patterns[0]!r} of {joined[0].source_patterns[0]!r}"
        raise ValueError(f"its weights would leave under other names: transformers makes {names}")
    if changes := [name for name in LOGIT_CHANGES if getattr(model.config, name, None) not in (None, 1)]:
        raise ValueError(f"its {changes[0]} changes the logits, which the learner does not know")
    if mixing := [name for name, module in model.named_modules() if isinstance(module, nn.Conv1d)]:
        raise ValueError(f"its {mixing[0]} would run on from one trajectory of a row into the next")
    if config.lora_rank:
        add_adapters(model, config)
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in model.base_model.layers:
            layer.training = True  # it is asked itself, of its parts none
    cost = cost_of(model)
    return shard(Scorer(model), config), cost


def shard(scorer: Scorer, config: LearnerConfig) -> Scorer:
    """FSDP2 per decoder layer and on the root.

    Layers stay gathered between forward and backward unless several GPUs share them: where this runs in fp32 on the
    CPU memory is not scarce, and on one GPU there is nothing to win.
    """
    mesh = init_device_mesh(config.device, (dist.get_world_size(),))
    computed = None if config.dtype == "float32" else getattr(torch, config.dtype)
    policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32 if computed else None)
    for layer in scorer.model.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=is_tight(config))
    return fully_shard(scorer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def is_tight(config: LearnerConfig) -> bool:
    """Whether weights and gradients are sharded between passes too: memory of a GPU is worth more than its links."""
    return config.device == "cuda" and dist.get_world_size() > 1


def reshard(scorer: nn.Module) -> None:
    """After a forward pass without a backward pass: parameters are fp32 shards again."""
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _settle_vector_functions() -> None:
    """The first call of each, by one thread alone.

    MKL 2024.2, which PyTorch is built with, chooses a function's code at its first call. Where two threads make it
    together, one of them may get a coarse variant for its share (pytorch issue 188792): cosines wrong by 1.5e-4 in one
    learner of some thousand, and log-probabilities by 1.4e-3.
    """
    for dtype in (torch.float32, torch.float64):
        for name in VECTOR_FUNCTIONS:
            getattr(torch.full((1,), 0.5, dtype=dtype), name)()


_settle_vector_functions()
