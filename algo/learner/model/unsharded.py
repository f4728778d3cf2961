"""The model of a single rank without sharding, with which the learner's canary needs no copy of the weights.

FSDP copies every shard before a pass, even if the shard is the whole weight. Here a model without weights of its own
computes with the shards themselves.

Invariant: it gives bit by bit what the sharded model gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from algo.learner.model.lora import add_adapters
from algo.learner.model.scorer import Scorer
from algo.learner.model.supported import empty

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from algo.learner.config import LearnerConfig


class UnshardedScorer:
    """Is called like `scorer`, the sharded model, and uses its current weights; without gradients."""

    def __init__(self, scorer: Scorer, config: LearnerConfig) -> None:
        self._scorer = scorer
        model = empty(scorer.model.config, config.attention)
        if config.lora_rank:
            with torch.device("meta"):
                add_adapters(model, config)
        self._empty = Scorer(model).eval()

    @property
    def model(self) -> PreTrainedModel:
        """The model that computes; it has no weights of its own."""
        return self._empty.model

    @staticmethod
    def fits(config: LearnerConfig) -> bool:
        """Returns whether the passes compute with the shard itself."""
        return dist.get_world_size() == 1 and config.dtype == "float32"

    @torch.no_grad()
    def __call__(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        weights = {
            name: weight.to_local() if isinstance(weight, DTensor) else weight
            for name, weight in self._scorer.named_parameters()
        }
        scores: tuple[Tensor, Tensor] = functional_call(
            self._empty, {**weights, **dict(self._scorer.named_buffers())}, inputs
        )
        return scores
