"""How the learner learns: plain values, which travel from the recipe to the ranks. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """How a batch becomes an update.

    minibatches: optimizer steps per batch. micro_batch_tokens: input positions (padding included) of one forward pass.
    warmup_steps: batches until the learning rate is reached. clip_low, clip_high: the ratio's bounds 1 - low, 1 + high.
    threads: of each rank. weight_transfer: how weights reach the replicas, as in ReplicaConfig; weights_dtype: what
    they are published in, the replicas' own. The old log-probabilities are the sampler's, so sampling must be at
    temperature 1.
    """

    lr: float = 3e-4
    warmup_steps: int = 3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    minibatches: int = 2
    micro_batch_tokens: int = 2048
    threads: int = 2
    weight_transfer: str = "shm"
    weights_dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        rules = (
            ("positive", ("lr", "grad_clip", "clip_high"), lambda value: value > 0),
            ("in (0, 1]", ("clip_low",), lambda value: 0 < value <= 1),
            ("at least 0", ("warmup_steps", "weight_decay"), lambda value: value >= 0),
            ("at least 1", ("minibatches", "micro_batch_tokens", "threads"), lambda value: value >= 1),
            ("one of shm, gloo, ipc, nccl", ("weight_transfer",), ("shm", "gloo", "ipc", "nccl").__contains__),
            ("float32 or bfloat16", ("weights_dtype",), ("float32", "bfloat16").__contains__),
            ("two numbers in [0, 1)", ("betas",), lambda value: len(value) == 2 and all(0 <= x < 1 for x in value)),
        )
        for rule, names, holds in rules:
            for name in names:
                if not holds(getattr(self, name)):
                    raise ValueError(f"LearnerConfig.{name} must be {rule}, got {getattr(self, name)!r}")
