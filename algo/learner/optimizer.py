"""AdamW over the trained parameters, with weight decay for matrices, not for norms and biases.

A norm's weight scales a whole feature and a bias shifts it; pulling them towards 0 is no regularisation. Source of the
split: GPT-3 and what came after (nanoGPT, Megatron).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from algo.learner.config import LearnerConfig


def adamw(parameters: Iterable[Tensor], config: LearnerConfig) -> torch.optim.AdamW:
    """Returns the optimizer, with matrices in one group and vectors in another; no group is empty."""
    parameters = list(parameters)
    matrices = [each for each in parameters if each.ndim > 1]
    vectors = [each for each in parameters if each.ndim <= 1]
    groups = [{"params": group} for group in (matrices, vectors) if group]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, fused=True)
    set_options(optimizer, config, batch=1)
    return optimizer


def set_options(optimizer: torch.optim.Optimizer, config: LearnerConfig, batch: int) -> None:
    """Sets the options of a batch, counted from 1, since a checkpoint brings the options of its own run."""
    for group in optimizer.param_groups:
        decays = group["params"][0].ndim > 1
        group["lr"] = config.lr_at(batch)
        group["betas"] = config.betas
        group["eps"] = config.adam_eps
        group["weight_decay"] = config.weight_decay if decays else 0.0
