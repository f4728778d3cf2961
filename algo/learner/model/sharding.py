"""Shards the model in training over the ranks with FSDP2.

Invariants
- Master weights and the reduction of gradients are fp32; `LearnerConfig.dtype` is the dtype of the passes.
- The sharding changes results only by rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from algo.learner.hosts import ranks_of_a_host
from algo.learner.model.context import Context

if TYPE_CHECKING:
    from algo.learner.config import LearnerConfig
    from algo.learner.model.scorer import Scorer


def copies_of(scorer: nn.Module) -> int:
    """Returns how many ranks hold each shard: 1, or with hybrid sharding one rank of each host."""
    return dist.get_world_size() // int(sharding_mesh(next(scorer.parameters())).size())


def sharding_mesh(weight: Tensor) -> DeviceMesh:
    """Returns the ranks that share one copy of a sharded weight."""
    mesh = weight.device_mesh
    return mesh if mesh.ndim == 1 else mesh["ranks"]


def shard(scorer: Scorer, config: LearnerConfig) -> Scorer:
    """Shards each decoder layer and the root with FSDP2.

    Layers stay gathered between forward and backward unless several GPUs share them: on the CPU, in fp32, memory is not
    scarce, and on one GPU there is nothing to gain.
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


def context_of(config: LearnerConfig) -> Context | None:
    """Returns the group of neighbouring ranks that share rows with this one; None if it shares none. A collective.

    Weights are sharded over the ranks of all groups together. Raises ValueError for ranks that cannot be divided.
    """
    ranks, size = dist.get_world_size(), config.context_parallel
    config.check_ranks(ranks)
    if size == 1:
        return None
    mesh = init_device_mesh(config.device, (ranks // size, size), mesh_dim_names=("groups", "context"))
    return Context(group=mesh.get_group("context"), rank=dist.get_rank() % size, ranks=size)


def reshard_between_passes(config: LearnerConfig) -> bool:
    """Returns whether weights and gradients are sharded between passes: a GPU's memory is scarcer than its links."""
    return config.device == "cuda" and dist.get_world_size() > 1


def reshard(scorer: nn.Module) -> None:
    """Makes parameters fp32 shards again, after a forward pass without a backward pass."""
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
