"""Estimators of a Kullback-Leibler divergence from sampled tokens, and the entropy of a distribution.

The estimates are of KL(policy || reference) per token, where logprobs_M are those of the policy, which sampled the
tokens, and ref_logprobs_M those of the other model. k2 is biased; k3 is unbiased and never negative (Schulman,
"Approximating KL Divergence", 2020). As losses they differ: on average k2 has the divergence's gradient, k3 that of the
reverse divergence. (The plain difference, k1, is unbiased too, but its gradient has mean 0, so it cannot be trained
with.)

Shape legend: M positions with loss, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def k2(logprobs_M: Tensor, ref_logprobs_M: Tensor) -> Tensor:
    """Returns (log p - log q)^2 / 2."""
    return 0.5 * (logprobs_M - ref_logprobs_M).square()


def k3(
    logprobs_M: Tensor,
    ref_logprobs_M: Tensor,
    *,
    clamp: float | None = 20.0,
    result_clamp: float | None = 10.0,
) -> Tensor:
    """Returns q / p - 1 - log(q / p), with the logarithm held to +-clamp and the result to +-result_clamp, unless None.

    A token beyond a bound has no gradient: one outlier of exp(20) would otherwise be the whole loss.
    """
    difference_M = ref_logprobs_M - logprobs_M
    if clamp is not None:
        difference_M = difference_M.clamp(-clamp, clamp)
    estimate_M = difference_M.exp() - difference_M - 1
    return estimate_M if result_clamp is None else estimate_M.clamp(-result_clamp, result_clamp)


def k3_with_gradient_of_k2(logprobs_M: Tensor, ref_logprobs_M: Tensor) -> Tensor:
    """Returns the value of k3 with the gradient of k2."""
    slope_M = k2(logprobs_M, ref_logprobs_M)
    return k3(logprobs_M, ref_logprobs_M).detach() + slope_M - slope_M.detach()


ESTIMATORS = {"k2": k2, "k3": k3, "k3_with_gradient_of_k2": k3_with_gradient_of_k2}


def mismatch(logprobs_M: Tensor, rollout_logprobs_M: Tensor) -> Tensor:
    """Returns r - 1 - log r, r = learner / sampler: KL(sampler || learner) per token, without clamps (a diagnostic)."""
    return k3(rollout_logprobs_M, logprobs_M, clamp=None, result_clamp=None)


def entropy(logits_V: Tensor) -> Tensor:
    """Returns -sum p log p in nats over the last axis of logits [..., V]; a logit of -inf contributes 0."""
    return torch.special.entr(logits_V.softmax(-1)).sum(-1)
