"""The values of training in the report and in the release, as constants."""

from __future__ import annotations

from dataclasses import dataclass, replace

from algo.learner.config import LearnerConfig
from algo.loss.policy_losses import PpoClip


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of training. Its budgets are those of one rollout."""

    response_tokens: int
    """Sampled and tool tokens."""
    turns: int
    """T."""
    steps: int
    new_optimizer: bool = True
    """False: moments and batches counted so far are those at the end of the stage before."""
    unsolved_only: bool = False
    """True: train only on problems that the stage before does not solve in all of `Values.filter_samples` samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """What decides a run, but for the chat, the tool and its limits (parts/sampling/protocol.py)."""

    stages: tuple[Stage, ...]
    prompts_per_step: int
    oversample: int = 2
    """Rollouts for each trained one: RoC keeps G of 2G."""
    group_size: int = 16
    """G."""
    filter_samples: int = 8
    eval_every: int = 5
    learner: LearnerConfig


# The report's values (arXiv 2508.20722). It does not give weight decay, gradient clipping, minibatches (one, as in the
# release) and how often it evaluates.
REPORT = Values(
    stages=(
        Stage(response_tokens=8 * 1024, turns=10, steps=300),
        Stage(response_tokens=12 * 1024, turns=10, steps=85, new_optimizer=False),
        Stage(response_tokens=12 * 1024, turns=15, steps=125, unsolved_only=True),
    ),
    prompts_per_step=512,
    learner=LearnerConfig(
        lr=1e-6,
        warmup_steps=20,
        schedule="constant",
        minibatches=1,
        weight_decay=0.0,
        grad_clip=1.0,
        reference_kl_coef=0.0,
        loss=PpoClip(clip_low=0.2, clip_high=0.28, dual_clip=None, aggregate="token"),
    ),
)
# The values of its published script, and verl's defaults where it is silent.
RELEASE = Values(
    stages=(Stage(response_tokens=8 * 1024, turns=5, steps=200),),
    prompts_per_step=128,
    learner=replace(
        REPORT.learner,
        weight_decay=0.01,
        loss=PpoClip(clip_low=0.2, clip_high=0.28, dual_clip=3.0, aggregate="token"),
    ),
)
VALUES: dict[str, Values] = {"report": REPORT, "release": RELEASE, "none": REPORT}
