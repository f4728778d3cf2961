"""The losses, as the learner calls them, against the peers."""

import dataclasses

import pytest
import torch

from algo.loss.interface import Tokens, Totals
from algo.loss.policy_losses import Cispo, Correction, Dppo, Gspo, PpoClip, Sapo
from tests.support.golden import Chosen, check, expected, over, rows


def clip(params):
    return {"clip_low": params["eps_low"], "clip_high": params["eps_high"]}


GOLDEN = {
    "ppo_clip": (lambda params: PpoClip(**clip(params), dual_clip=None), "old_log_prob"),
    "ppo_dual_clip": (lambda params: PpoClip(**clip(params), dual_clip=params["dual_clip_c"]), "old_log_prob"),
    "gspo": (lambda params: Gspo(**clip(params), token_gradient=True), "old_log_prob"),
    "cispo": (lambda params: Cispo(**clip(params)), "old_log_prob"),
    "sapo": (lambda params: Sapo(tau_positive=params["tau_pos"], tau_negative=params["tau_neg"]), "old_log_prob"),
    "dppo_tv_plus_kl": (
        lambda params: Dppo(
            low=params["mask_low"], high=params["mask_high"], square_coef=params["kl_tau"], truncation=None
        ),
        "rollout_log_prob",
    ),
    "dppo_binary_kl": (
        lambda params: Dppo(low=params["delta_low"], high=params["delta_high"], divergence="kl", truncation=None),
        "rollout_log_prob",
    ),
}


AVERAGES = {
    **dict.fromkeys(("token-mean", "token mean", "masked sum", "sum / global token count"), "token"),
    "seq-mean-token-mean": "sequence",
}


UNCLAMPED = ("dppo_tv_plus_kl", "clamp_ratio_25")  # the peer's ratio has no clamp


TESTED = [
    row
    for definition in GOLDEN
    for row in rows("policy_loss", definition=definition)
    if row["params"]["reduction"] in AVERAGES
    and row["params"].get("advantage") != "mean over the sequence"
    and (definition, row["params"]["case"]) != UNCLAMPED
]


def tokens_of(chosen, sampler):
    return Tokens(
        logprobs_M=chosen.logprobs_BT[chosen.mask_BT],
        old_logprobs_M=chosen.at[sampler],
        advantages_M=chosen.at["advantages"],
        sequence_M=chosen.sequence_M,
        sequences=chosen.sequences,
        versions_M=torch.zeros(len(chosen.sequence_M), dtype=torch.int32),
    )


@over(TESTED)
def test_matches_golden_in_loss_gradient_and_clipped_share(row):
    params, outputs = row["params"], expected(row)
    make, sampler = GOLDEN[params["definition"]]
    loss = dataclasses.replace(make(params), aggregate=AVERAGES[params["reduction"]])
    chosen = Chosen.of(row)
    tokens = {"masked sum": 1, "sum / global token count": params.get("global_tokens")}
    totals = Totals(
        tokens=tokens.get(params["reduction"], max(1, int(chosen.mask_BT.sum()))),
        sequences=max(1, int(chosen.mask_BT.any(1).sum())),
    )
    value, counts = loss(tokens_of(chosen, sampler), totals)
    check(value, outputs["loss"], params["tol"])
    chosen.check_gradient(value, outputs["grad_log_prob"], params["tol"])
    if params["definition"] == "ppo_clip" and "clip_frac" in outputs:
        share = (counts["clip_low"] + counts["clip_high"]).item() / max(1, int(chosen.mask_BT.sum()))
        assert share == pytest.approx(outputs["clip_frac"], abs=1e-9)


def test_the_golden_rows_cover_every_loss():
    assert {row["params"]["definition"] for row in TESTED} == GOLDEN.keys()


@over(rows("off_policy", definition="ppo_dual_clip_times_token_tis"))
def test_decoupled_ppo_with_a_correction_matches_golden(row):
    params, outputs = row["params"], expected(row)
    chosen = Chosen.of(row)
    proximal_M = chosen.at["old_log_prob"]
    tokens = tokens_of(chosen, "rollout_log_prob")._replace(proximal_logprobs_M=proximal_M)
    loss = PpoClip(
        **clip(params), dual_clip=params["dual_clip_c"], proximal=True, correction=Correction(upper=params["cap"])
    )
    value, counts = loss(tokens, Totals(max(1, int(chosen.mask_BT.sum())), chosen.sequences))
    check(value, outputs["loss"], params["tol"])
    if "grad_log_prob" in outputs:
        chosen.check_gradient(value, outputs["grad_log_prob"], params["tol"])
    weights_M = (proximal_M - tokens.old_logprobs_M).exp().clamp(max=params["cap"])
    assert counts["weight"].item() == pytest.approx(weights_M.sum().item())


@over(rows("off_policy", definition="opsm"))
def test_a_correction_by_drift_matches_golden(row):
    chosen = Chosen.of(row)
    tokens = tokens_of(chosen, "old_log_prob")
    weights_M = Correction(kind="mask", upper=None, drift=row["params"]["delta"]).weights(tokens)
    chosen.check_tokens(weights_M, expected(row)["opsm_mask"], 0)
