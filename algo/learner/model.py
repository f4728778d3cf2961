"""The model under training as the trainer sees it: log-probabilities at chosen positions, sharded with FSDP2.

Invariants
- Master weights and the reduction of gradients are fp32; `LearnerConfig.dtype` is what the passes compute in.
- No tensor of logits has more than LOGIT_ROWS rows, unless all of them are fewer than KEPT_LOGITS.
- With `fp32_head` logits are products of the same bf16 hidden states and weights, multiplied and kept in fp32.
- Activation checkpointing and offload, the kind of attention and the sharding change results only by rounding.

Shape legend: R = 1 row of L tokens, M positions with loss, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from algo.learner.attention import bounds, register
from algo.learner.hosts import ranks_of_a_host
from algo.learner.lora import add_adapters
from algo.learner.measure.flops import Cost, cost_of
from algo.learner.supported import check_names, check_scores, check_structure, check_tied, empty

if TYPE_CHECKING:
    from algo.learner.config import LearnerConfig

# Rows of logits at once; with a vocabulary of 150k in fp32 that is 0.6 GB, and it is recomputed in the backward pass.
LOGIT_ROWS = 1024
# What PyTorch hands to MKL's vector functions on the CPU.
VECTOR_FUNCTIONS = ["acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p"]
VECTOR_FUNCTIONS += ["log2", "sin", "sqrt", "tan", "tanh"]
# Below this many logits in all they are kept for the backward pass: recomputing would cost more than 64 MB is worth.
KEPT_LOGITS = 1 << 24


class Scorer(nn.Module):
    """Log-probabilities and entropies at chosen positions; the FSDP root, so that the head runs on gathered weights."""

    def __init__(self, model: PreTrainedModel, *, fp32_head: bool = False, activation_offload: bool = False) -> None:
        super().__init__()
        self.model = model
        self.fp32_head = fp32_head
        self.activation_offload = activation_offload

    def forward(
        self,
        token_ids_RL: Tensor,
        position_ids_RL: Tensor,
        lengths: Sequence[int],
        positions_M: Tensor,
        targets_M: Tensor,
        shared: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """log p(targets_M) in fp32, and the (detached) entropy there, both [M].

        lengths: of the row's trajectories. shared: how many tokens at the row's beginning all of them go on from.
        """
        with self._kept_activations(token_ids_RL.device):
            hidden_RLH = self.model.base_model(
                input_ids=token_ids_RL,
                position_ids=position_ids_RL,
                use_cache=False,
                **bounds(lengths, token_ids_RL.device, shared),
            ).last_hidden_state
        hidden_MH = hidden_RLH.flatten(0, 1).index_select(0, positions_M)
        recompute = len(targets_M) * self.model.config.vocab_size > KEPT_LOGITS
        score = partial(checkpoint, _score, use_reentrant=False) if recompute else _score
        score = partial(score, self._head())
        chunks = zip(hidden_MH.split(LOGIT_ROWS), targets_M.split(LOGIT_ROWS), strict=True)
        logprobs, entropies = zip(*(score(*chunk) for chunk in chunks), strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _kept_activations(self, device: torch.device) -> AbstractContextManager[None]:
        """Where the backward pass finds what the layers kept for it: with checkpointing, their inputs."""
        if not self.activation_offload:
            return nullcontext()
        return save_on_cpu(pin_memory=device.type == "cuda")

    def _head(self) -> Callable[[Tensor], Tensor]:
        """From hidden states to logits. In fp32 its weights are cast once a pass, not once a chunk."""
        head: nn.Module = self.model.get_output_embeddings()
        if not self.fp32_head:
            return head
        weights = {name: weight.float() for name, weight in head.named_parameters()}
        return lambda hidden_MH: functional_call(head, weights, hidden_MH.float())


def _score(head: Callable[[Tensor], Tensor], hidden_MH: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
    return LogProb.apply(head(hidden_MH), targets_M)


class LogProb(torch.autograd.Function):
    """(log p(targets_M), entropy_M) of logits_MV in fp32; the entropy carries no gradient.

    Overwrites logits that are fp32. Two tensors of [M, V] are there at once, and the probabilities are kept: a third of
    what log_softmax and an entropy beside it touch.
    """

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
        logits_MV = logits_MV.float()
        # Relative to the largest logit, where a likely token's log-probability is small: no digits cancel.
        logits_MV -= logits_MV.amax(-1, keepdim=True)
        probs_MV = logits_MV.exp()
        sum_M1 = probs_MV.sum(-1, keepdim=True)
        probs_MV /= sum_M1
        log_sum_M = sum_M1.log().squeeze(-1)
        logprobs_M = logits_MV.gather(-1, targets_M[:, None]).squeeze(-1) - log_sum_M
        # As matrices: a product of each two numbers first would be a third tensor.
        entropy_M = log_sum_M - torch.bmm(probs_MV[:, None], logits_MV[:, :, None]).flatten()
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

    Every rank builds the model without memory (the meta device) and shards it. Rank 0 reads the weights into host
    memory, of which a machine holds one whole copy; each weight goes to its shards and is forgotten there, so that a
    GPU never holds more than its shards and one weight.
    Raises OSError or ValueError for a checkpoint, a model (`algo.learner.supported`) or names that do not fit.
    """
    register()
    transformers_logging.disable_progress_bar()
    model = empty(AutoConfig.from_pretrained(source, trust_remote_code=False), config.attention)
    check_structure(model)
    whole = _whole(source, config) if dist.get_rank() == 0 else {}
    model.eval()  # the sampler drops nothing
    if config.lora_rank:
        with torch.device("meta"):
            add_adapters(model, config)
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in model.base_model.layers:
            layer.training = True  # it is asked itself, of its parts none
    cost = cost_of(model)
    scorer = Scorer(model, fp32_head=config.fp32_head, activation_offload=config.activation_offload)
    scorer = shard(scorer, config)
    scorer.to_empty(device=choose_device(config.device))
    scatter(scorer, whole)
    return scorer, cost


def _whole(source: Path, config: LearnerConfig) -> dict[str, Tensor]:
    """The checkpoint's weights and constants in host memory, by the scorer's names; new adapters too."""
    model = read(source, config.attention)
    if config.lora_rank:
        add_adapters(model, config)
    parts = [*model.named_parameters(prefix="model"), *model.named_buffers(prefix="model")]
    return {name: part.detach() for name, part in parts}


def read(source: Path, attention: str) -> PreTrainedModel:
    """Returns the whole model with the checkpoint's weights, in fp32 on the CPU. Raises as `load`."""
    model, found = AutoModelForCausalLM.from_pretrained(
        source,
        trust_remote_code=False,
        use_safetensors=True,
        dtype=torch.float32,
        attn_implementation=attention,
        output_loading_info=True,
    )
    if missing := found["missing_keys"]:  # the library has made random numbers of them
        raise ValueError(f"holds no weight {min(missing)} ({len(missing)} are missing)")
    check_names(model, source)
    check_tied(model)
    check_scores(model, attention, Scorer)
    return model


@torch.no_grad()
def scatter(scorer: Scorer, whole: dict[str, Tensor]) -> None:
    """Rank 0's weights and constants become those of all ranks. whole: both by name, in host memory, and empty
    afterwards; the other ranks give none.

    One weight at a time, each rank getting its shard: FSDP shards the first dimension into equal parts but for the last
    ones, which may be shorter or empty.
    """
    copies = copies_of(scorer)
    ranks = dist.get_world_size() // copies
    for name, weight in scorer.named_parameters():
        part = weight.to_local()
        if ranks == copies == 1:
            part.copy_(whole.pop(name))
            continue
        rows = -(-len(weight) // ranks)
        own = part.new_empty(rows, *part.shape[1:])
        parts = None
        if whole:
            padded = own.new_zeros(ranks * rows, *own.shape[1:])
            padded[: len(weight)] = whole.pop(name)
            parts = [*padded.split(rows)] * copies
        dist.scatter(own, parts, src=0)
        part.copy_(own[: len(part)])
    for name, constant in scorer.named_buffers():  # those that no file holds too: the frequencies of rotary embeddings
        if whole:
            constant.copy_(whole.pop(name))
        dist.broadcast(constant, src=0)


def copies_of(scorer: nn.Module) -> int:
    """How many ranks hold each shard: 1, or with hybrid sharding one of each host."""
    return dist.get_world_size() // int(sharding_mesh(next(scorer.parameters())).size())


def sharding_mesh(weight: Tensor) -> DeviceMesh:
    """The ranks that share one copy of a sharded weight."""
    mesh = weight.device_mesh
    return mesh if mesh.ndim == 1 else mesh["ranks"]


def shard(scorer: Scorer, config: LearnerConfig) -> Scorer:
    """FSDP2 per decoder layer and on the root.

    Layers stay gathered between forward and backward unless several GPUs share them: where this runs in fp32 on the
    CPU memory is not scarce, and on one GPU there is nothing to win.
    """
    ranks = dist.get_world_size()
    mesh = init_device_mesh(config.device, (ranks,))
    if config.sharding == "hybrid" and (within := ranks_of_a_host()) < ranks:
        mesh = init_device_mesh(config.device, (ranks // within, within), mesh_dim_names=("hosts", "ranks"))
    computed = None if config.dtype == "float32" else getattr(torch, config.dtype)
    policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32 if computed else None)
    for layer in scorer.model.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_between_passes(config))
    return fully_shard(scorer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def reshard_between_passes(config: LearnerConfig) -> bool:
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
