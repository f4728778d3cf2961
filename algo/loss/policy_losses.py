"""The losses that come with the library: frozen dataclasses of plain values, chosen by `LearnerConfig.loss`.

    LearnerConfig(loss=Gspo(aggregate="token"))
    LearnerConfig(loss=PpoClip(proximal=True, correction=Correction(level="token", upper=2.0)))

Invariants
- The losses of parts add up to that of the whole minibatch: their divisors come from `Totals`.
- A rejected token still counts among the minibatch's tokens: rejecting does not make the others weigh more.
- Importing this file does not load torch: a recipe builds a loss, the learner calls it.

Besides the scalar, each loss returns sums over the tokens (`Loss`): `clip_low` and `clip_high` count tokens whose bound
was reached; `weight` adds up the correction's weights, and `rejected` counts those that are 0.

Shape legend: M positions with loss; a ratio is learner / sampler unless `proximal` is set, see `_Policy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from sandbox.require import Rule, at_least, none_or, one_of, positive, require, true_or_false, within

if TYPE_CHECKING:
    from torch import Tensor

    from algo.loss.interface import Aggregate, Tokens, Totals

Counts = dict[str, "Tensor"]
Level = Literal["token", "sequence", "geometric"]
Kind = Literal["clamp", "icepop", "mask"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Weighs each token by the difference between its sampler and the model that learns from it.

    The ratio is proximal / sampler if the loss has `proximal`, else learner / sampler.

    level: whose ratio is taken, the token's, or the product or geometric mean of its trajectory's.
    kind: "clamp" holds the ratio to the bounds (truncated importance sampling), "icepop" makes it 0 outside of them,
    "mask" weighs 1 inside and 0 outside.
    lower, upper: bounds of the ratio; None is no bound.
    veto: a trajectory with any token whose ratio is below it weighs 0.
    drift: a failure (A < 0) weighs 0 if its tokens have become less likely by more than this many nats on average
    (DeepSeek-V3.2, arXiv 2512.02556).
    also: another correction, whose weights multiply these, such as a mask with other bounds beside a clamp of the
    tokens' ratios: `Correction(upper=2.0, also=Correction(level="geometric", kind="mask", lower=0.99, upper=1.01))`.
    normalize: the weights of a minibatch are divided by the mean of those that are not 0 (self-normalised importance
    sampling), so that they change how tokens compare but not how long the step is. It needs a loss without other terms:
    `sampler_kl_coef` and `LearnerConfig.reference_kl_coef` must be 0.

    >>> Correction(level="geometric", kind="mask", lower=1.1, upper=1.01)
    Traceback (most recent call last):
    ValueError: Correction.lower must be at most upper (1.01), got 1.1
    """

    level: Level = "token"
    kind: Kind = "clamp"
    lower: float | None = None
    upper: float | None = 2.0
    veto: float | None = None
    drift: float | None = None
    also: Correction | None = None
    normalize: bool = False

    def __post_init__(self) -> None:
        require("Correction.normalize", self.normalize, true_or_false)
        require("Correction.also", self.also, none_or(Rule("a Correction", lambda also: isinstance(also, Correction))))
        if self.also is not None and self.also.normalize:
            raise ValueError("Correction.also.normalize must be False: normalize of the outer one holds for both")
        require("Correction.level", self.level, one_of(*get_args(Level)))
        require("Correction.kind", self.kind, one_of(*get_args(Kind)))
        limits = ("lower", "upper", "veto", "drift")
        for name in limits:
            require(f"Correction.{name}", getattr(self, name), none_or(at_least(0)))
        if all(getattr(self, name) is None for name in limits):
            raise ValueError("Correction.upper must be a number where lower, veto and drift are None, got None")
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"Correction.lower must be at most upper ({self.upper}), got {self.lower}")

    @property
    def only_rejects(self) -> bool:
        """Whether all weights are 1 or 0."""
        return self.kind == "mask" and not self.normalize and (self.also is None or self.also.only_rejects)

    def weights(self, tokens: Tokens) -> Tensor:
        """Returns constant weights, [M], at least 0. They are not normalised yet: that takes the whole minibatch's."""
        from algo.loss import corrections

        learner_M = tokens.logprobs_M if tokens.proximal_logprobs_M is None else tokens.proximal_logprobs_M
        learner_M = learner_M.detach()
        sampler_M = tokens.old_logprobs_M
        token_ratios_M = corrections.token_ratios(learner_M, sampler_M)
        match self.level:
            case "token":
                ratios_M = token_ratios_M
            case "sequence":
                ratios_M = corrections.product_ratios(learner_M, sampler_M, tokens.sequence_M, tokens.sequences)
            case "geometric":
                ratios_M = corrections.geometric_ratios(learner_M, sampler_M, tokens.sequence_M, tokens.sequences)
        match self.kind:
            case "clamp":
                unbounded = self.lower is None and self.upper is None
                weights_M = ratios_M if unbounded else ratios_M.clamp(self.lower, self.upper)
            case "icepop":
                weights_M = corrections.icepop(ratios_M, self.lower, self.upper)
            case "mask":
                weights_M = corrections.within(ratios_M, self.lower, self.upper).to(ratios_M.dtype)
        if self.veto is not None:
            kept_M = corrections.no_outlier(token_ratios_M, tokens.sequence_M, tokens.sequences, lower=self.veto)
            weights_M = weights_M * kept_M
        if self.drift is not None:
            weights_M = weights_M * corrections.not_drifted(
                learner_M, sampler_M, tokens.advantages_M, tokens.sequence_M, tokens.sequences, self.drift
            )
        return weights_M if self.also is None else weights_M * self.also.weights(tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Policy:
    """The fields and the composition that all policy losses share; each of them gives the losses of the tokens.

    aggregate: "token" is the mean over the minibatch's tokens (DAPO), "sequence" the mean over trajectories of their
    token means. A number n is the sum over all tokens divided by n times the number of trajectories (Dr. GRPO: n is the
    longest length allowed).
    proximal: the ratio is learner / proximal, where proximal is the learner before the step's first update (decoupled
    PPO, arXiv 2505.24298); all but the first minibatch are then scored twice, and the sampler enters through
    `correction` alone. Without `proximal` the loss's own ratio is already learner / sampler, and `correction` may only
    reject ("mask").
    sampler_kl_coef: coefficient of the k3 estimate of KL(learner || sampler), which is added to each token's loss. For
    the divergence from the model that training began with, see `LearnerConfig.reference_kl_coef`.
    """

    aggregate: Aggregate = "token"
    proximal: bool = False
    correction: Correction | None = None
    sampler_kl_coef: float = 0.0

    def __post_init__(self) -> None:
        _check_aggregate(self)
        require(f"{type(self).__name__}.sampler_kl_coef", self.sampler_kl_coef, at_least(0))
        if self.correction and not self.correction.only_rejects and not self.proximal:
            reason = "its ratio is in the loss already, so without proximal=True a correction can only reject"
            raise ValueError(f"{type(self).__name__}.correction.kind must be 'mask': {reason}")
        if self.normalizes and self.sampler_kl_coef:
            raise ValueError(
                f"{type(self).__name__}.sampler_kl_coef must be 0 with correction.normalize, got {self.sampler_kl_coef}"
            )

    @property
    def normalizes(self) -> bool:
        """Whether the learner divides by the minibatch's mean weight."""
        return self.correction is not None and self.correction.normalize

    def __call__(self, tokens: Tokens, totals: Totals) -> tuple[Tensor, Counts]:
        from algo.loss import kl
        from algo.loss.interface import aggregated

        anchor_M = tokens.proximal_logprobs_M if self.proximal else tokens.old_logprobs_M
        assert anchor_M is not None, "the learner gives them to a loss with proximal=True"
        losses_M, counts = self._losses(tokens, anchor_M)
        if self.correction:
            weights_M = self.correction.weights(tokens)
            losses_M = weights_M * losses_M
            counts |= {"weight": weights_M.sum(), "rejected": (weights_M == 0).sum()}
        if self.sampler_kl_coef:
            losses_M = losses_M + self.sampler_kl_coef * kl.k3(tokens.logprobs_M, tokens.old_logprobs_M)
        return aggregated(losses_M, tokens, totals, self.aggregate), counts

    def _losses(self, tokens: Tokens, anchor_M: Tensor) -> tuple[Tensor, Counts]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class PpoClip(_Policy):
    """The clipped objective with the ratio's bounds 1 - clip_low and 1 + clip_high (`objectives.ppo_clip`).

    dual_clip: above 1; the loss of a token with A < 0 is at most dual_clip |A|. With None it grows with the ratio, and
    one token that the learner finds likely and the sampler did not can outweigh the batch. 3 is the recipes' value in
    the field (arXiv 1912.09729; verl, which the released rStar2-Agent was trained with).
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0

    def __post_init__(self) -> None:
        _Policy.__post_init__(self)
        require("PpoClip.clip_low", self.clip_low, within("(0, 1]"))
        require("PpoClip.clip_high", self.clip_high, positive)
        require("PpoClip.dual_clip", self.dual_clip, none_or(within("(1, inf)")))

    def _losses(self, tokens: Tokens, anchor_M: Tensor) -> tuple[Tensor, Counts]:
        from algo.loss import objectives

        ratio_M = objectives.log_ratio(tokens.logprobs_M, anchor_M).exp()
        losses_M = objectives.clipped(ratio_M, tokens.advantages_M, self.clip_low, self.clip_high, self.dual_clip)
        return losses_M, _replaced(ratio_M.detach(), tokens.advantages_M, self.clip_low, self.clip_high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gspo(_Policy):
    """PPO's clip with one ratio per trajectory (`objectives.gspo`); its bounds are two orders narrower than a token's.

    token_gradient: GSPO-token. Source of the defaults: arXiv 2507.18071, section 5.1.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    token_gradient: bool = False
    aggregate: Aggregate = "sequence"

    def __post_init__(self) -> None:
        _Policy.__post_init__(self)
        require("Gspo.clip_low", self.clip_low, within("(0, 1]"))
        require("Gspo.clip_high", self.clip_high, positive)

    def _losses(self, tokens: Tokens, anchor_M: Tensor) -> tuple[Tensor, Counts]:
        from algo.loss import corrections, objectives

        losses_M = objectives.gspo(
            tokens.logprobs_M,
            anchor_M,
            tokens.advantages_M,
            tokens.sequence_M,
            tokens.sequences,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            token_gradient=self.token_gradient,
        )
        ratio_M = corrections.geometric_ratios(tokens.logprobs_M, anchor_M, tokens.sequence_M, tokens.sequences)
        return losses_M, _replaced(ratio_M, tokens.advantages_M, self.clip_low, self.clip_high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cispo(_Policy):
    """REINFORCE weighted by the clipped ratio (`objectives.cispo`): no token loses its gradient.

    clip_low: 1 is no lower bound, as in arXiv 2506.13585.
    """

    clip_low: float = 1.0
    clip_high: float = 4.0

    def __post_init__(self) -> None:
        _Policy.__post_init__(self)
        require("Cispo.clip_low", self.clip_low, within("(0, 1]"))
        require("Cispo.clip_high", self.clip_high, positive)

    def _losses(self, tokens: Tokens, anchor_M: Tensor) -> tuple[Tensor, Counts]:
        from algo.loss import corrections, objectives

        losses_M = objectives.cispo(
            tokens.logprobs_M, anchor_M, tokens.advantages_M, clip_low=self.clip_low, clip_high=self.clip_high
        )
        ratio_M = corrections.token_ratios(tokens.logprobs_M, anchor_M)
        low_M, high_M = ratio_M < 1 - self.clip_low, ratio_M > 1 + self.clip_high
        return losses_M, {"clip_low": low_M.sum(), "clip_high": high_M.sum()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Dppo(_Policy):
    """The ratio's objective inside a trust region around the sampler, 0 outside (`objectives.dppo`).

    low, high: the divergence ("tv" | "kl" of the two outcomes) that stops a token with A < 0, and with A > 0.
    both_sides: stops on both sides whatever the advantage (IPO).
    truncation: the largest ratio that weighs a token (20 is verl's value; None: no bound, as in prime-rl). The region
    does not stop a token with A < 0 that the learner finds likelier than the sampler did: it is pushed down on purpose.
    The truncation only keeps one such token from outweighing the batch; its gradient stays.
    square_coef: coefficient of (log ratio)^2, which is added everywhere.
    """

    low: float = 0.2
    high: float = 0.2
    divergence: Literal["tv", "kl"] = "tv"
    both_sides: bool = False
    truncation: float | None = 20.0
    square_coef: float = 0.0

    def __post_init__(self) -> None:
        _Policy.__post_init__(self)
        for name in ("low", "high", "square_coef"):
            require(f"Dppo.{name}", getattr(self, name), at_least(0))
        require("Dppo.divergence", self.divergence, one_of("tv", "kl"))
        require("Dppo.truncation", self.truncation, none_or(at_least(1)))
        if self.proximal:
            raise ValueError("Dppo.proximal must be False (its region is around the sampler), got True")

    def _losses(self, tokens: Tokens, anchor_M: Tensor) -> tuple[Tensor, Counts]:
        from algo.loss import objectives

        advantages_M = tokens.advantages_M
        out_M = ~objectives.trusted(
            tokens.logprobs_M,
            anchor_M,
            advantages_M,
            low=self.low,
            high=self.high,
            divergence=self.divergence,
            both_sides=self.both_sides,
        )
        losses_M = objectives.dppo(
            tokens.logprobs_M,
            anchor_M,
            advantages_M,
            low=self.low,
            high=self.high,
            divergence=self.divergence,
            both_sides=self.both_sides,
            truncation=self.truncation,
            square_coef=self.square_coef,
        )
        stopped_low, stopped_high = out_M & (advantages_M < 0), out_M & (advantages_M > 0)
        return losses_M, {"clip_low": stopped_low.sum(), "clip_high": stopped_high.sum()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sapo(_Policy):
    """A smooth gate in place of the clip (`objectives.sapo`); a larger tau closes it sooner."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        _Policy.__post_init__(self)
        require("Sapo.tau_positive", self.tau_positive, positive)
        require("Sapo.tau_negative", self.tau_negative, positive)

    def _losses(self, tokens: Tokens, anchor_M: Tensor) -> tuple[Tensor, Counts]:
        from algo.loss import objectives

        losses_M = objectives.sapo(
            tokens.logprobs_M,
            anchor_M,
            tokens.advantages_M,
            tau_positive=self.tau_positive,
            tau_negative=self.tau_negative,
        )
        return losses_M, {}


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossEntropy:
    """The loss of supervised fine-tuning, -log p of the tokens. Advantages and the sampler are ignored.

    It counts `nll`, the sum of -log p: per token it can be compared between runs, whatever the aggregation.
    """

    aggregate: Aggregate = "token"

    def __post_init__(self) -> None:
        _check_aggregate(self)

    def __call__(self, tokens: Tokens, totals: Totals) -> tuple[Tensor, Counts]:
        from algo.loss.interface import aggregated

        loss = aggregated(-tokens.logprobs_M, tokens, totals, self.aggregate)
        return loss, {"nll": -tokens.logprobs_M.detach().sum()}


def _replaced(ratio_M: Tensor, advantages_M: Tensor, clip_low: float, clip_high: float) -> Counts:
    """Returns how many tokens had their loss replaced by the lower (A < 0) and the upper (A > 0) bound."""
    low_M = (ratio_M < 1.0 - clip_low) & (advantages_M < 0)
    high_M = (ratio_M > 1.0 + clip_high) & (advantages_M > 0)
    return {"clip_low": low_M.sum(), "clip_high": high_M.sum()}


def _check_aggregate(owner: Any) -> None:
    rule = Rule("'token', 'sequence' or positive", lambda value: value in ("token", "sequence") or value > 0)
    require(f"{type(owner).__name__}.aggregate", owner.aggregate, rule)
