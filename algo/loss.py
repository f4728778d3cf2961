"""The policy loss: PPO's clipped objective with separate bounds, averaged over tokens.

Invariants
- The loss is a sum over tokens divided by a count that the caller gives (the tokens of the whole minibatch, over all
  ranks and microbatches), so it does not depend on how a minibatch is cut.
- Masked positions are replaced before any arithmetic: whatever they hold changes neither loss nor gradient.
- An empty mask gives 0, attached to the graph.

Shape legend: tensors of any one shape, called M here: the positions that may carry loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# exp(20) is about 5e8: large enough never to touch a healthy ratio, small enough to stay finite in float32.
LOG_RATIO_CLAMP = 20.0


class LossSums(NamedTuple):
    """Detached sums over the unmasked tokens, to be added over microbatches and ranks; `ratio_max` is a maximum.

    clip_low, clip_high: tokens whose loss the lower (A < 0) or upper (A > 0) bound replaced.
    kl: sum of r - 1 - log r, an estimate of KL(sampler || learner) (k3, Schulman 2020) with r = learner / sampler.
    """

    tokens: Tensor
    clip_low: Tensor
    clip_high: Tensor
    ratio: Tensor
    kl: Tensor
    entropy: Tensor
    ratio_max: Tensor


def policy_loss(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    mask_M: Tensor | None = None,
    *,
    clip_low: float,
    clip_high: float,
    total_tokens: float | Tensor,
    entropy_M: Tensor | None = None,
) -> tuple[Tensor, LossSums]:
    """-sum(min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)) / total_tokens with r = exp(logprobs - old_logprobs).

    Source: PPO (arXiv 1707.06347, eq. 7) with the bounds of DAPO (arXiv 2503.14476) and its token-level mean.
    mask_M None: every position counts. The log-ratio is clamped to +-20. Differentiable in logprobs_M alone.
    """
    if mask_M is not None:
        logprobs_M = torch.where(mask_M, logprobs_M, 0.0)
        old_logprobs_M = torch.where(mask_M, old_logprobs_M, 0.0)
        advantages_M = torch.where(mask_M, advantages_M, 0.0)
        entropy_M = None if entropy_M is None else torch.where(mask_M, entropy_M, 0.0)
    log_ratio_M = (logprobs_M - old_logprobs_M).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratio_M = log_ratio_M.exp()
    clipped_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high)
    objective_M = torch.minimum(ratio_M * advantages_M, clipped_M * advantages_M)
    loss = -objective_M.sum() / total_tokens
    with torch.no_grad():
        tokens = ratio_M.new_tensor(ratio_M.numel()) if mask_M is None else mask_M.sum().to(ratio_M.dtype)
        unmasked = ratio_M.numel() - tokens  # a masked position has ratio 1 and k3 0
        return loss, LossSums(
            tokens=tokens,
            clip_low=((ratio_M < 1.0 - clip_low) & (advantages_M < 0)).sum(),
            clip_high=((ratio_M > 1.0 + clip_high) & (advantages_M > 0)).sum(),
            ratio=ratio_M.sum() - unmasked,
            kl=(ratio_M - 1.0 - log_ratio_M).sum(),
            entropy=torch.zeros_like(tokens) if entropy_M is None else entropy_M.sum(),
            ratio_max=ratio_M.max() if tokens > 0 else torch.zeros_like(tokens),
        )
