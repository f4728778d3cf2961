"""How the learner learns: plain values, which travel from the recipe to the ranks. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from algo.losses import PpoClip
from algo.plain import build, plain

if TYPE_CHECKING:
    from algo.loss import Loss


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """How a batch becomes an update.

    minibatches: optimizer steps per batch. micro_batch_tokens: input positions (padding included) of one forward pass.
    warmup_steps: batches until the learning rate is reached. threads: of each rank.
    loss: one of `algo.losses` or your own (`algo.loss.Loss`); kept in its plain form, so that `dataclasses.asdict` of
    this is what the learner is sent. The old log-probabilities are the sampler's: sampling must be at temperature 1.
    mismatch_tolerance: the largest |learner - sampler| of a log-probability that a token of a trajectory may have which
    the weights under training sampled; beyond it the learner ends before it updates. None: not checked. The default
    holds for float32 on both sides; bfloat16 on either side needs about 0.5.
    """

    lr: float = 3e-4
    warmup_steps: int = 3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    loss: Loss | Mapping[str, Any] = PpoClip()  # noqa: RUF009  frozen
    mismatch_tolerance: float | None = 1e-3
    minibatches: int = 2
    micro_batch_tokens: int = 2048
    threads: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        try:
            loss = build(self.loss)
            object.__setattr__(self, "loss", plain(loss))
        except ValueError as error:
            raise ValueError(f"LearnerConfig.loss: {error}") from error
        if not callable(loss):
            raise ValueError(f"LearnerConfig.loss: {loss!r} must be callable (algo.loss.Loss)")
        rules = (
            ("positive", ("lr", "grad_clip"), lambda value: value > 0),
            ("None or positive", ("mismatch_tolerance",), lambda value: value is None or value > 0),
            ("at least 0", ("warmup_steps", "weight_decay"), lambda value: value >= 0),
            ("at least 1", ("minibatches", "micro_batch_tokens", "threads"), lambda value: value >= 1),
            ("two numbers in [0, 1)", ("betas",), lambda value: len(value) == 2 and all(0 <= x < 1 for x in value)),
        )
        for rule, names, holds in rules:
            for name in names:
                if not holds(getattr(self, name)):
                    raise ValueError(f"LearnerConfig.{name} must be {rule}, got {getattr(self, name)!r}")
