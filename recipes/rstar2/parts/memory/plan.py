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
    """

    model: Model
    devices: DevicePlan
    learner: LearnerConfig
    max_tokens: int
    gpu_bytes: int
    samples: bool = True

    @property
    def adapters(self) -> int:
        return self.learner.lora_rank * self.model.layers * self.model.adapter_width

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
        return self.adapters or self.model.parameters


def gib(size: float) -> str:
    """Shows bytes in GiB.

    >>> gib(3 << 29)
    '1.5 GiB'
    """
    return f"{size / GIB:.1f} GiB"
