"""Importance weights and rejections for tokens whose sampler is not the model that learns from them.

Invariants
- A ratio is learner / sampler, and bounds are bounds of ratios; both ends of a bound are kept.
- Sequence weights are the "product" of the tokens' ratios or their "geometric" mean, as their name says.
- Only positions that carry loss come in. Weights are constants: they never carry a gradient.
- A rejected token still counts among the minibatch's tokens: rejecting does not make the others weigh more.

Weights compose by multiplication with each other, with rejections and with the losses of `algo.loss.objectives`:

    ratios_M = token_ratios(logprobs_M, rollout_logprobs_M)
    weights_M = ratios_M.clamp(max=2.0) * no_outlier(ratios_M, sequence_M, sequences, lower=1e-4)  # TIS with a veto
    losses_M = weights_M * ppo_clip(logprobs_M, old_logprobs_M, advantages_M, clip_low=0.2, clip_high=0.28)

That is decoupled PPO (AReaL, arXiv 2505.24298, after arXiv 2110.00641) if the old log-probabilities are those of the
proximal policy and the ratios are proximal / sampler; `algo.loss.policy_losses` composes it so.

Truncated importance sampling (TIS) is `ratios_M.clamp(max=cap)` at any level. The divergences of `algo.loss.kl`, with
the sampler's log-probabilities first, are statistics for `within`, as they are or through `aggregate.over_sequence`.

Shape legend: M positions with loss, S sequences; sequence_M holds each position's sequence in [0, S).
"""

from __future__ import annotations

import torch
from torch import Tensor

from algo.loss.aggregate import over_sequence
from algo.loss.objectives import LOG_RATIO_CLAMP, log_ratio


def token_ratios(logprobs_M: Tensor, rollout_logprobs_M: Tensor, clamp: float | None = LOG_RATIO_CLAMP) -> Tensor:
    """Returns the ratio of each token."""
    return log_ratio(logprobs_M.detach(), rollout_logprobs_M, clamp).exp()


def product_ratios(
    logprobs_M: Tensor, rollout_logprobs_M: Tensor, sequence_M: Tensor, sequences: int, clamp: float = LOG_RATIO_CLAMP
) -> Tensor:
    """Returns the ratio of a sequence's probabilities at each of its tokens: unbiased, with the largest variance."""
    difference_M = logprobs_M.detach() - rollout_logprobs_M
    return over_sequence(difference_M, sequence_M, sequences, "sum").clamp(-clamp, clamp).exp()[sequence_M]


def geometric_ratios(
    logprobs_M: Tensor, rollout_logprobs_M: Tensor, sequence_M: Tensor, sequences: int, clamp: float = LOG_RATIO_CLAMP
) -> Tensor:
    """Returns the geometric mean of a sequence's ratios at each token: biased, and independent of its length."""
    difference_M = logprobs_M.detach() - rollout_logprobs_M
    return over_sequence(difference_M, sequence_M, sequences, "mean").clamp(-clamp, clamp).exp()[sequence_M]


def within(values_M: Tensor, lower: float | None = None, upper: float | None = None) -> Tensor:
    """Returns bool [M]: lower <= value <= upper; a bound of None does not apply."""
    keep_M = torch.ones_like(values_M, dtype=torch.bool)
    if lower is not None:
        keep_M &= values_M >= lower
    if upper is not None:
        keep_M &= values_M <= upper
    return keep_M


def icepop(ratios_M: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """Returns the ratio where it is within the bounds, else 0. Source: slime, slime/backends/megatron_utils/loss.py."""
    return ratios_M * within(ratios_M, lower, upper)


def no_outlier(
    ratios_M: Tensor, sequence_M: Tensor, sequences: int, *, lower: float | None = None, upper: float | None = None
) -> Tensor:
    """Returns bool [M]: False at every token of a sequence in which any token is outside the bounds (a veto)."""
    outside_M = (~within(ratios_M, lower, upper)).to(ratios_M.dtype)
    return over_sequence(outside_M, sequence_M, sequences, "max")[sequence_M] == 0


def not_drifted(
    logprobs_M: Tensor, old_logprobs_M: Tensor, advantages_M: Tensor, sequence_M: Tensor, sequences: int, delta: float
) -> Tensor:
    """Returns bool [M]: False where A < 0 in a sequence whose mean of old - new log-probabilities is above delta.

    Such a failure has already become less likely. Source: off-policy sequence masking of DeepSeek-V3.2 (arXiv
    2512.02556).
    """
    drift_S = over_sequence(old_logprobs_M - logprobs_M.detach(), sequence_M, sequences, "mean")
    return ~((advantages_M < 0) & (drift_S > delta)[sequence_M])
