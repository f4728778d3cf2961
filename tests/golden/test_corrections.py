"""Corrections for what was sampled off-policy, against the peers."""

from functools import partial

import torch

from algo.loss import kl
from algo.loss.aggregate import over_sequence, total
from algo.loss.corrections import (
    geometric_ratios,
    icepop,
    no_outlier,
    not_drifted,
    product_ratios,
    token_ratios,
    within,
)
from algo.loss.objectives import log_ratio, ppo_clip
from tests.support.golden import Chosen, check, expected, over, rows


class Case:
    """A row's inputs at its positions with loss, and the ratios at every level."""

    def __init__(self, row, learner="old_log_prob"):
        self.row = Chosen.of(row, leaf=learner)
        self.params = row["params"]
        self.segments = (self.row.sequence_M, self.row.sequences)
        at = self.row.at
        self.learner, self.rollout = at[learner].detach(), at.get("rollout_log_prob")
        clamp = self.params.get("log_clamp", self.params.get("clamp"))
        if self.rollout is not None:
            self.token = token_ratios(self.learner, self.rollout, clamp)
            self.product = product_ratios(self.learner, self.rollout, *self.segments)
            self.geometric = geometric_ratios(self.learner, self.rollout, *self.segments)

    def level(self, level):
        return {"token": self.token, "sequence": self.product, "geometric": self.geometric}[level]

    def per_token(self, statistic_S):
        return statistic_S[self.row.sequence_M]


def bounds(params):
    return params["lower"], params["upper"]


def normalised(weights_M):
    """The peers' weights with mean 1. No loss of ours has it: a mean over a microbatch depends on the cut."""
    return weights_M / weights_M.mean()


def normalised_by_sequence(weights_M, sequence_M, sequences):
    """The same for sequence weights, over the sequences that have a token."""
    means_S = over_sequence(weights_M, sequence_M, sequences, "mean")
    return weights_M / means_S[sequence_M.unique()].mean()


def verl_keeps(case, rule, threshold):
    """One of verl's rejections: divergences are of KL(sampler || learner), bounds of k1 those of sampler / learner."""
    level, _, kind = rule.rpartition("_")
    if kind == "k1":
        low, high = map(float, threshold.split("_"))
        reduced = {"token": case.token, "seq_sum": case.product, "seq_mean": case.geometric}[level]
        return within(1 / reduced, low, high)
    values = {"k2": kl.k2, "k3": partial(kl.k3, result_clamp=None)}[kind](case.rollout, case.learner)
    if level != "token":
        values = case.per_token(over_sequence(values, *case.segments, level.removeprefix("seq_")))
    return within(values, upper=float(threshold))


def slime_mis(case, params):
    """Weights and kept tokens of slime's combination of truncation, rejection, veto and normalisation."""
    ratios = case.level(params["tis_level"])
    low, high = params["tis_lower"], params["tis_upper"]
    if params["tis_mode"] == "mask":  # IcePop, with the zeros in its mask instead of its weights
        weights, keep = ratios, within(ratios, low, high)
    else:
        weights = ratios.clamp(min=low if params["tis_mode"] == "clip" else None, max=high)
        keep = torch.ones_like(ratios, dtype=torch.bool)
    if params["use_rs"]:
        rs_low, rs_high = params["rs_lower"], params["rs_upper"]
        rs_high = high if rs_high is None else rs_high
        keep &= within(case.level(params["rs_level"]), rs_low or low or 1 / rs_high, rs_high)
    if params["veto"] is not None:
        keep &= no_outlier(case.token, *case.segments, lower=params["veto"])
    if params["batch_normalize"]:
        weights = (
            normalised(weights) if params["tis_level"] == "token" else normalised_by_sequence(weights, *case.segments)
        )
        if params["tis_level"] != "token":  # slime counts a sequence without a token as one of weight 0
            weights = weights * case.row.sequences / len(case.row.sequence_M.unique())
    return weights, keep


def corrected(case):
    """(weights or None, kept or None) as the peer defines them."""
    params, definition = case.params, case.params["definition"]
    if definition == "tis_token":
        weights = case.token.clamp(max=params["cap"])
        return (normalised(weights) if params.get("batch_normalize") else weights), None
    if definition == "tis_sequence":
        weights = case.product.clamp(max=params["cap"])
        return (normalised_by_sequence(weights, *case.segments) if params.get("batch_normalize") else weights), None
    if definition == "icepop":
        return icepop(case.token, *bounds(params)), None
    if definition == "mis":
        return slime_mis(case, params)
    if definition in ("geometric_mask", "product_mask", "token_mask"):
        level = {"geometric_mask": "geometric", "product_mask": "sequence", "token_mask": "token"}[definition]
        return None, within(case.level(level), *bounds(params))
    if definition == "outlier_sequence_veto":
        return None, no_outlier(case.token, *case.segments, lower=params["lower"], upper=params["upper"])
    if definition == "token_mask_plus_tis_plus_veto":
        keep = within(case.token, *bounds(params)) & no_outlier(case.token, *case.segments, lower=params["veto"])
        return case.token.clamp(max=params["cap"]), keep
    assert definition.startswith("rejection_")
    rules = definition.removeprefix("rejection_").split(",")
    thresholds = params["threshold"].split(",")
    kept = [verl_keeps(case, rule, threshold) for rule, threshold in zip(rules, thresholds, strict=True)]
    return None, torch.stack(kept).all(0)


SPECIAL = ("opsm", "ppo_dual_clip_times_token_tis")


@over([row for row in rows("off_policy") if row["params"]["definition"] not in SPECIAL])
def test_weights_and_rejections_match_golden(row):
    outputs, tolerance = expected(row), row["params"]["tol"]
    case = Case(row)
    weights, keep = corrected(case)
    if outputs.get("weights") is not None:
        case.row.check_tokens(weights, outputs["weights"], tolerance)
    if outputs.get("mask_after") is not None:
        keep = torch.ones_like(case.token) if keep is None else keep
        case.row.check_tokens(keep, outputs["mask_after"], 0)


@over(rows("off_policy", definition="opsm"))
def test_masking_of_drifted_failures_matches_golden(row):
    case = Case(row, learner="log_prob")
    at = case.row.at
    keep = not_drifted(at["log_prob"], at["old_log_prob"], at["advantages"], *case.segments, row["params"]["delta"])
    case.row.check_tokens(keep, expected(row)["opsm_mask"], 0)


@over(rows("off_policy", definition="ppo_dual_clip_times_token_tis"))
def test_weights_times_the_clipped_loss_match_golden(row):
    params, outputs, tolerance = row["params"], expected(row), row["params"]["tol"]
    chosen = Chosen.of(row)
    at = chosen.at
    losses = ppo_clip(
        chosen.logprobs_BT[chosen.mask_BT],
        at["old_log_prob"],
        at["advantages"],
        clip_low=params["eps_low"],
        clip_high=params["eps_high"],
        dual_clip=params["dual_clip_c"],
    )
    losses = losses * token_ratios(at["old_log_prob"], at["rollout_log_prob"]).clamp(max=params["cap"])
    check_loss(chosen, losses, outputs, tolerance)


def check_loss(chosen, losses, outputs, tolerance):
    loss = total(losses, max(1, int(chosen.mask_BT.sum())))
    chosen.check_tokens(losses, outputs["per_token"], tolerance)
    check(loss, outputs["loss"], tolerance)
    if "grad_log_prob" in outputs:
        chosen.check_gradient(loss, outputs["grad_log_prob"], tolerance)


def areal_weights(case):
    """Behaviour weights after one of AReaL's rejections: sequence ratios are geometric whatever it rejects by, its
    divergences are of KL(proximal || sampler), and without a rejection it applies no weight.
    """
    params, (low, high) = case.params, (case.params.get("lower"), case.params.get("upper"))
    if params["definition"] == "no_rejection":
        return torch.ones_like(case.token)
    by_sequence = params["level"] == "sequence"
    weights = case.token
    if params["metric"] == "ratio":
        weights = case.geometric if by_sequence else case.token
        statistic = {"mean": weights, "sum": case.product, "max": case.token}[params["agg"]]
    else:
        k1, k3 = partial(log_ratio, clamp=None), partial(kl.k3, clamp=None, result_clamp=None)
        estimator = {"kl_k1": k1, "kl_k2": kl.k2, "kl_k3": k3}
        statistic = estimator[params["metric"]](case.learner, case.rollout)
    if by_sequence and (params["agg"] == "max" or params["metric"] != "ratio"):
        statistic = case.per_token(over_sequence(statistic, *case.segments, params["agg"]))
    if params["action"] == "clamp":
        return weights.clamp(min=low, max=high)
    return weights * within(statistic, low, high)


@over(rows("decoupled_ppo"))
def test_decoupled_ppo_matches_golden(row):
    params, outputs, tolerance = row["params"], expected(row), row["params"]["tol"]
    case, chosen = Case(row), Chosen.of(row)
    weights = areal_weights(case)
    losses = weights * ppo_clip(
        chosen.logprobs_BT[chosen.mask_BT],
        chosen.at["old_log_prob"],
        chosen.at["advantages"],
        clip_low=params["eps_low"],
        clip_high=params["eps_high"],
        clamp=None,
    )
    check_loss(chosen, losses, outputs, tolerance)
    if outputs.get("weights") is not None:
        chosen.check_tokens(weights, outputs["weights"], tolerance)
