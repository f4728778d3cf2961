"""Policy objectives: the loss of each token, before any averaging.

Invariants
- Only positions that carry loss come in (`aggregate.choose`), so masked values change neither loss nor gradient.
- Every objective is differentiable in logprobs_M alone and is minimised.
- A ratio is learner / sampler; its logarithm is clamped to +-20 unless the caller gives another bound.

Shape legend: M positions with loss, S sequences; sequence_M holds each position's sequence in [0, S).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from algo.loss.aggregate import over_sequence

# exp(20) is about 5e8: large enough never to touch a healthy ratio, small enough to stay finite in float32.
LOG_RATIO_CLAMP = 20.0


def log_ratio(logprobs_M: Tensor, old_logprobs_M: Tensor, clamp: float | None = LOG_RATIO_CLAMP) -> Tensor:
    """Returns logprobs - old_logprobs, clamped to +-clamp unless that is None."""
    difference_M = logprobs_M - old_logprobs_M
    return difference_M if clamp is None else difference_M.clamp(-clamp, clamp)


def ppo_clip(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    clamp: float | None = LOG_RATIO_CLAMP,
) -> Tensor:
    """Returns -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); for A < 0 it is at most -dual_clip A.

    Source: PPO (arXiv 1707.06347, eq. 7), separate bounds of DAPO (arXiv 2503.14476), dual clip (arXiv 1912.09729),
    where dual_clip is above 1.
    """
    ratio_M = log_ratio(logprobs_M, old_logprobs_M, clamp).exp()
    return clipped(ratio_M, advantages_M, clip_low, clip_high, dual_clip)


def clipped(
    ratio_M: Tensor, advantages_M: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Returns the clipped objective of a ratio, which may be a token's or a sequence's."""
    clipped_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses_M = -torch.minimum(ratio_M * advantages_M, clipped_M * advantages_M)
    if dual_clip is None:
        return losses_M
    return torch.where(advantages_M < 0, torch.minimum(losses_M, -dual_clip * advantages_M), losses_M)


def gspo(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    sequence_M: Tensor,
    sequences: int,
    *,
    clip_low: float,
    clip_high: float,
    token_gradient: bool = False,
    clamp: float | None = 10.0,
) -> Tensor:
    """Returns PPO's clipped objective with one ratio per sequence, the geometric mean over its tokens.

    token_gradient: each token's gradient is its own with its own advantage (GSPO-token); otherwise it flows through the
    sequence's mean. The two are equal if the advantage is constant in a sequence.
    clamp: the upper bound of the mean's logarithm.

    It is meant to be averaged by `aggregate.mean_of_means`. Source: GSPO (arXiv 2507.18071).
    """
    means_S = over_sequence(logprobs_M - old_logprobs_M, sequence_M, sequences, "mean")
    mean_M = means_S[sequence_M]
    if token_gradient:
        mean_M = mean_M.detach() + logprobs_M - logprobs_M.detach()
    if clamp is not None:
        mean_M = mean_M.clamp(max=clamp)
    return clipped(mean_M.exp(), advantages_M, clip_low, clip_high)


def reinforce(logprobs_M: Tensor, advantages_M: Tensor, weights_M: Tensor) -> Tensor:
    """Returns -w A log p with constant importance weights, such as those of `algo.loss.corrections`."""
    return -weights_M.detach() * advantages_M * logprobs_M


def cispo(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clamp: float | None = LOG_RATIO_CLAMP,
) -> Tensor:
    """Returns REINFORCE weighted by the clipped ratio: no token loses its gradient. Source: arXiv 2506.13585."""
    ratio_M = log_ratio(logprobs_M, old_logprobs_M, clamp).exp()
    return reinforce(logprobs_M, advantages_M, ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high))


def trusted(
    logprobs_M: Tensor,
    rollout_logprobs_M: Tensor,
    advantages_M: Tensor,
    *,
    low: float,
    high: float,
    divergence: Literal["tv", "kl"] = "tv",
    both_sides: bool = False,
) -> Tensor:
    """Returns DPPO's trust region, bool [M]: False where a further step in the advantage's direction would leave it.

    The divergence is that of the two outcomes "this token" and "another one": total variation |p - q|, or KL(q || p),
    with p the learner's and q the sampler's probability. A token with A > 0 is stopped beyond `high` if p > q, one with
    A < 0 beyond `low` if p < q.

    both_sides: stops beyond `high` upwards and `low` downwards whatever the advantage (IPO).

    Source: DPPO (arXiv 2602.04879); bounds and signs as in prime-rl, src/prime_rl/trainer/rl/loss.py, and SkyRL,
    skyrl/backends/skyrl_train/utils/ppo_utils.py.
    """
    p_M, q_M = logprobs_M.detach().exp(), rollout_logprobs_M.exp()
    distance_M = (p_M - q_M).abs() if divergence == "tv" else _two_outcome_kl(q_M, p_M)
    above_M, below_M = (p_M > q_M) & (distance_M > high), (p_M < q_M) & (distance_M > low)
    if both_sides:
        return ~(above_M | below_M)
    return ~((above_M & (advantages_M > 0)) | (below_M & (advantages_M < 0)))


def _two_outcome_kl(q_M: Tensor, p_M: Tensor) -> Tensor:
    # A very small 1 - p is rounded to 0 in float32.
    return torch.xlogy(q_M, q_M / p_M) + torch.xlogy(1 - q_M, (1 - q_M) / (1 - p_M).clamp(min=1e-7))


def dppo(
    logprobs_M: Tensor,
    rollout_logprobs_M: Tensor,
    advantages_M: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    divergence: Literal["tv", "kl"] = "tv",
    both_sides: bool = False,
    truncation: float | None = None,
    square_coef: float = 0.0,
    clamp: float | None = LOG_RATIO_CLAMP,
) -> Tensor:
    """Returns -min(r, truncation) A inside the region of `trusted`, 0 outside, plus square_coef (log r)^2 everywhere.

    The gradient of the first term is -min(r, truncation) A grad log p: unlike a clip, the truncation of a ratio lowers
    the token's weight but does not stop it. None truncates nothing. Source: DPPO (arXiv 2602.04879); the truncation as
    in verl, verl/trainer/ppo/core_algos.py, whose bound is 20 (prime-rl has none).
    """
    log_ratio_M = log_ratio(logprobs_M, rollout_logprobs_M, clamp)
    keep_M = trusted(
        logprobs_M, rollout_logprobs_M, advantages_M, low=low, high=high, divergence=divergence, both_sides=both_sides
    )
    ratio_M = log_ratio_M.exp()
    if truncation is not None:
        weight_M = ratio_M.detach().clamp(max=truncation)
        ratio_M = weight_M * (1.0 + logprobs_M - logprobs_M.detach())  # its value is the weight
    losses_M = -ratio_M * advantages_M
    return losses_M * keep_M + square_coef * log_ratio_M.square()


def sapo(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    clamp: float | None = LOG_RATIO_CLAMP,
) -> Tensor:
    """Returns -4 / tau sigmoid(tau (r - 1)) A: a smooth gate in place of the clip. Source: SAPO (arXiv 2511.20347)."""
    ratio_M = log_ratio(logprobs_M, old_logprobs_M, clamp).exp()
    tau_M = torch.where(advantages_M > 0, tau_positive, tau_negative).to(ratio_M.dtype)
    return -4 / tau_M * torch.sigmoid(tau_M * (ratio_M - 1)) * advantages_M
