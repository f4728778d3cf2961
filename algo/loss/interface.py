"""The interface of a loss, which `algo.loss.policy_losses` implements: it maps the tokens of a microbatch to a scalar.

Invariants
- Only positions that carry loss come in, of whole trajectories: values elsewhere change nothing.
- A loss is a sum divided by counts of the whole minibatch (`Totals`, over all ranks and microbatches), so it does not
  depend on how a minibatch is divided. Without any token it is 0, attached to the graph.
- `statistics` does not depend on the loss: every run reports the same numbers on ratio and divergence.

Shape legend: M positions with loss, K tokens that a teacher thinks likeliest at a position.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from algo.loss.aggregate import mean_of_means, over_sequence, total
from algo.loss.objectives import LOG_RATIO_CLAMP

# How the losses of tokens become one number; `algo.loss.policy_losses` explains each value.
Aggregate = Literal["token", "sequence"] | float


class Tokens(NamedTuple):
    """Tensors [M] of a microbatch. Without a teacher, a loss is differentiable in logprobs_M alone.

    old_logprobs_M: those of the sampler. versions_M: the weight version that it had.
    sequence_M: each token's trajectory, int64 in [0, sequences).
    proximal_logprobs_M: the learner's before the step's first update, for a loss whose `proximal` is true.
    teacher_logprobs_MK: those of a teacher's likeliest tokens, if the batch has them, and top_logprobs_MK those that
    the learner gives the same tokens, in which a loss is differentiable too.
    """

    logprobs_M: Tensor
    old_logprobs_M: Tensor
    advantages_M: Tensor
    sequence_M: Tensor
    sequences: int
    versions_M: Tensor
    proximal_logprobs_M: Tensor | None = None
    top_logprobs_MK: Tensor | None = None
    teacher_logprobs_MK: Tensor | None = None


class Totals(NamedTuple):
    """Counts of the whole minibatch over all ranks: tokens with loss, and trajectories with at least one."""

    tokens: int
    sequences: int


class Loss(Protocol):
    """A frozen dataclass of plain values in a module that the learner can import, called once a microbatch.

    It returns the scalar to minimise and detached sums over the tokens, under the same names each time; a name that
    ends in `_max` is a maximum. They are reported per token of the step.

        @dataclass(frozen=True, kw_only=True, slots=True)
        class Hinge:
            margin: float = 1.0

            def __call__(self, tokens, totals):
                short_M = self.margin - tokens.advantages_M * (tokens.logprobs_M - tokens.old_logprobs_M)
                return short_M.relu().sum() / totals.tokens, {"short": (short_M > 0).sum()}

    `LearnerConfig(loss=Hinge(margin=0.5))` trains with it; `algo.contracts.check_loss(Hinge())` checks it. A loss with
    an attribute `proximal` that is true gets tokens.proximal_logprobs_M.
    """

    def __call__(self, tokens: Tokens, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]: ...


def aggregated(losses_M: Tensor, tokens: Tokens, totals: Totals, how: Aggregate) -> Tensor:
    """Returns the tokens' share of the minibatch's loss; `how` is explained in `algo.loss.policy_losses`."""
    if how == "token":
        return total(losses_M, totals.tokens)
    if how == "sequence":
        return mean_of_means(losses_M, tokens.sequence_M, tokens.sequences, totals.sequences)
    return total(losses_M, totals.sequences * float(how))


@torch.no_grad()
def statistics(tokens: Tokens, live: int | None = None) -> dict[str, Tensor]:
    """Returns sums over the tokens, and maxima, which are 0 without a token.

    ratio_mean, ratio_max: learner / sampler, with its logarithm clamped to +-20.
    kl: the sum of r - 1 - log r, an estimate of KL(sampler || learner) (k3, Schulman 2020).
    mismatch_max: the largest |log r| before the clamp.
    mismatch_fresh_max: the largest |log r| of trajectories that version `live` alone sampled; 0 if `live` is None.
    mismatch_fresh_mean: the sum of these |log r|, which a step divides by mismatch_checked, their number.
    """
    difference_M = tokens.logprobs_M - tokens.old_logprobs_M
    log_ratio_M = difference_M.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratio_M = log_ratio_M.exp()
    fresh_M = fresh(tokens.sequence_M, tokens.sequences, tokens.versions_M, live)
    return {
        "tokens": ratio_M.new_tensor(ratio_M.numel()),
        "ratio_mean": ratio_M.sum(),
        "kl": (ratio_M - 1.0 - log_ratio_M).sum(),
        "mismatch_checked": fresh_M.sum(),
        "ratio_max": _max(ratio_M),
        "mismatch_max": _max(difference_M.abs()),
        "mismatch_fresh_max": _max(difference_M.abs()[fresh_M]),
        "mismatch_fresh_mean": difference_M.abs()[fresh_M].sum(),
    }


def fresh(sequence_M: Tensor, sequences: int, versions_M: Tensor, live: int | None) -> Tensor:
    """Returns bool [M]: whether every token of its trajectory was sampled by version `live`; all False with None.

    A trajectory that continued over an update may have attended to keys and values of the weights before it.
    """
    if live is None:
        return torch.zeros_like(versions_M, dtype=torch.bool)
    other_M = (versions_M != live).float()
    return over_sequence(other_M, sequence_M, sequences, "max")[sequence_M] == 0


def _max(values_M: Tensor) -> Tensor:
    return values_M.max() if values_M.numel() else values_M.sum()
