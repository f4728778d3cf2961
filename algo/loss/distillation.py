"""The divergence of a student from its teacher over the teacher's likeliest tokens, as a loss beside another one.

    LearnerConfig(loss=TopK(direction="forward"))

A batch must have `teacher_ids_NK` (`algo.distill.distilled` with `top`). Distillation by sampled tokens alone needs
none of this: it is an advantage (`algo.distill.token_advantages`) for any policy loss.

Importing this file does not load torch: a recipe builds the loss, the learner calls it.

Shape legend: M positions with loss, K tokens that the teacher thinks likeliest at each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from algo.loss.policy_losses import PpoClip
from sandbox.require import one_of, positive, require

if TYPE_CHECKING:
    from torch import Tensor

    from algo.loss.interface import Aggregate, Tokens, Totals

Direction = Literal["reverse", "forward"]
REST = 1e-7  # least probability, as -log, that is left to all other tokens: keeps its logarithm finite


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK:
    """Adds the divergence of each position to a policy loss, which takes the advantages as ever.

    direction: "reverse" is KL(student || teacher), which keeps the student to what the teacher would do; "forward" is
    KL(teacher || student), which makes it cover all that the teacher would do. Both are over K + 1 events: the K
    likeliest tokens of the teacher, and any other token. That is a lower bound of the divergence over the vocabulary,
    and never below 0. The gradient goes through the learner's log-probabilities of these tokens, not through what was
    sampled before them (as in GKD, arXiv 2306.13649); nothing is clipped.

    >>> TopK(direction="both")
    Traceback (most recent call last):
    ValueError: TopK.direction must be one of 'reverse', 'forward', got 'both'
    """

    direction: Direction = "reverse"
    coef: float = 1.0
    """Weight of the divergence beside the policy loss."""
    policy: Any = field(default_factory=PpoClip)
    """A loss of `algo.loss.policy_losses` for the advantages."""

    def __post_init__(self) -> None:
        require("TopK.direction", self.direction, one_of(*get_args(Direction)))
        require("TopK.coef", self.coef, positive)
        if getattr(self.policy, "normalizes", False):
            raise ValueError("TopK.policy must be a loss whose correction has normalize=False, got one with True")

    @property
    def proximal(self) -> bool:
        """Whether the policy loss needs the learner's log-probabilities before the step."""
        return bool(getattr(self.policy, "proximal", False))

    @property
    def aggregate(self) -> Aggregate:
        """How the divergences of tokens become one number: as the policy loss does it."""
        return getattr(self.policy, "aggregate", "token")

    def __call__(self, tokens: Tokens, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss and its counts, with the sum of the divergences as `teacher_kl`.

        Raises ValueError for tokens without a teacher.
        """
        from algo.loss.interface import aggregated

        student_MK, teacher_MK = tokens.top_logprobs_MK, tokens.teacher_logprobs_MK
        if student_MK is None and len(tokens.logprobs_M):
            raise ValueError("TopK needs a batch with teacher_ids_NK, got none. Fix: a teacher with top >= 1")
        loss, counts = self.policy(tokens, totals)
        if student_MK is None or teacher_MK is None:  # a microbatch that only fills up
            return loss, counts | {"teacher_kl": loss.detach() * 0.0}
        kl_M = divergence(student_MK, teacher_MK, self.direction)
        added = self.coef * aggregated(kl_M, tokens, totals, self.aggregate)
        return loss + added, counts | {"teacher_kl": kl_M.detach().sum()}


def divergence(student_MK: Tensor, teacher_MK: Tensor, direction: Direction) -> Tensor:
    """Returns KL(student || teacher), "reverse", or KL(teacher || student), "forward", over K tokens and the rest, [M].

    student_MK, teacher_MK: log-probabilities of the same K different tokens.
    """
    student_MJ, teacher_MJ = _with_rest(student_MK), _with_rest(teacher_MK)
    first, second = (student_MJ, teacher_MJ) if direction == "reverse" else (teacher_MJ, student_MJ)
    return (first.exp() * (first - second)).sum(-1)


def _with_rest(logprobs_MK: Tensor) -> Tensor:
    """Returns the log-probabilities with that of all other tokens as the last one."""
    import torch

    log_sum_M1 = torch.logsumexp(logprobs_MK, -1, keepdim=True).clamp(max=-REST)
    return torch.cat([logprobs_MK, torch.log(-torch.expm1(log_sum_M1))], -1)
