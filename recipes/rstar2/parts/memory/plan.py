"""A model and the settings that decide how much memory a run of it takes."""

from __future__ import annotations

from dataclasses import dataclass

from algo.learner.config import LearnerConfig
from engine.assembly.devices import DevicePlan
from recipes.rstar2.parts.memory.model import Model

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Says what is run on which GPUs.

    max_tokens: length of the longest trajectory; the learner's rows (`micro_batch_tokens`) hold it.
    samples: whether replicas sample too, as in reinforcement learning; supervised training has none.
    host_gpus: GPUs of a host, over which hybrid sharding divides a copy of the weights.
    """

    model: Model
    devices: DevicePlan
    learner: LearnerConfig
    max_tokens: int
    gpu_bytes: int
    samples: bool = True
    host_gpus: int = 8

    @property
    def shards(self) -> int:
        """Returns R, the number of ranks that share a copy of the weights."""
        ranks = self.devices.learner_ranks
        return min(ranks, self.host_gpus) if self.learner.sharding == "hybrid" else ranks

    @property
    def adapters(self) -> int:
        return self.learner.lora_rank * self.model.adapter_width(self.learner.lora_targets)

    @property
    def rank_tokens(self) -> int:
        """Returns N, the tokens that a rank has of a row (`LearnerConfig.context_parallel`)."""
        return -(-self.learner.micro_batch_tokens // self.learner.context_parallel)

    @property
    def weights(self) -> int:
        """Returns P, the number of all parameters."""
        return self.model.parameters + self.adapters

    @property
    def trained(self) -> int:
        """Returns T, the number of trained parameters."""
        if self.adapters:
            return self.adapters
        mixture = self.model.mixture
        frozen = (
            mixture.layers * mixture.experts * self.model.hidden if mixture and not self.learner.train_router else 0
        )
        return self.model.parameters - frozen

    def of_a_rank(self, parameters: int) -> int:
        """Returns how many of the parameters rank 0 has; experts are given to ranks whole, so it may have more."""
        experts = self.model.experts if parameters >= self.model.experts else 0
        return (parameters - experts) // self.shards + int(experts * self.padding) // self.shards

    @property
    def padding(self) -> float:
        """Returns how much larger the experts are once they are filled up to as many for each rank."""
        if self.model.mixture is None:
            return 1.0
        experts = self.model.mixture.experts
        return -(-experts // self.shards) * self.shards / experts

    @property
    def layer(self) -> int:
        """Returns the parameters of the largest layer, filled up to equal shards."""
        experts = self.model.mixture.matrices if self.model.mixture else 0
        return self.model.layer_parameters + int(experts * (self.padding - 1))


def gib(size: float) -> str:
    """Shows bytes in GiB.

    >>> gib(3 << 29)
    '1.5 GiB'
    """
    return f"{size / GIB:.1f} GiB"
