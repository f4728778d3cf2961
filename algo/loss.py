"""The policy loss: PPO's clipped objective with separate bounds, averaged over tokens.

Invariants
- The loss is a sum over tokens divided by a count that the caller gives (the tokens of the whole minibatch, over all
  ranks and microbatches), so it does not depend on how a minibatch is cut.
- Masked positions are left out before any arithmetic: whatever they hold changes neither loss nor gradient.
- An empty mask gives 0, attached to the graph.

Shape legend: tensors of any one shape, called M here: the positions that may carry loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from algo.aggregate import choose, total
from algo.objective import LOG_RATIO_CLAMP, clipped


class LossSums(NamedTuple):
    """Detached sums over the chosen tokens, to be added over microbatches and ranks; the last two are maxima.

    clip_low, clip_high: tokens whose loss the lower (A < 0) or upper (A > 0) bound replaced.
    kl: sum of r - 1 - log r, an estimate of KL(sampler || learner) (k3, Schulman 2020) with r = learner / sampler.
    mismatch_max: the largest |log r|, before the clamp.
    """

    tokens: Tensor
    clip_low: Tensor
    clip_high: Tensor
    ratio: Tensor
    kl: Tensor
    ratio_max: Tensor
    mismatch_max: Tensor


def policy_loss(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    mask_M: Tensor | None = None,
    *,
    clip_low: float,
    clip_high: float,
    total_tokens: float | Tensor,
) -> tuple[Tensor, LossSums]:
    """-sum(min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)) / total_tokens with r = exp(logprobs - old_logprobs).

    Source: PPO (arXiv 1707.06347, eq. 7) with the bounds of DAPO (arXiv 2503.14476) and its token-level mean.
    mask_M None: every position counts. The log-ratio is clamped to +-20. Differentiable in logprobs_M alone.
    """
    if mask_M is not None:
        logprobs_M, old_logprobs_M, advantages_M = choose(mask_M, logprobs_M, old_logprobs_M, advantages_M)
    difference_M = logprobs_M - old_logprobs_M
    log_ratio_M = difference_M.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratio_M = log_ratio_M.exp()
    loss = total(clipped(ratio_M, advantages_M, clip_low, clip_high), total_tokens)
    with torch.no_grad():
        return loss, LossSums(
            tokens=ratio_M.new_tensor(ratio_M.numel()),
            clip_low=((ratio_M < 1.0 - clip_low) & (advantages_M < 0)).sum(),
            clip_high=((ratio_M > 1.0 + clip_high) & (advantages_M > 0)).sum(),
            ratio=ratio_M.sum(),
            kl=(ratio_M - 1.0 - log_ratio_M).sum(),
            ratio_max=ratio_M.max() if ratio_M.numel() else ratio_M.sum(),  # 0 without a token
            mismatch_max=difference_M.abs().max() if ratio_M.numel() else ratio_M.sum(),
        )
