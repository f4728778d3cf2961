"""Estimates of the KL divergence against the peers."""

import torch

from algo.loss import kl
from algo.loss.objectives import log_ratio
from tests.support.golden import Chosen, expected, over, rows, tensor


def estimate(params, logprobs_M, ref_M, ratios_M):
    kind = params["definition"]
    if kind == "k3_straight_through_k2_intended":
        return kl.k3_with_gradient_of_k2(logprobs_M, ref_M)
    if kind.startswith("k3"):
        bounds = {"clamp": params.get("delta_clamp"), "result_clamp": params["result_clamp"]}
        return kl.k3(logprobs_M, ref_M, **bounds) * (1 if ratios_M is None else ratios_M)
    difference_M = log_ratio(logprobs_M, ref_M, clamp=None)
    ours = {"k1": difference_M, "k2": kl.k2(logprobs_M, ref_M), "abs": difference_M.abs()}[kind]
    bound = params.get("result_clamp")  # AReaL's default also bounds k1 and k2
    return ours if bound is None else ours.clamp(-bound, bound)


@over([row for row in rows("kl") if "error" not in row["outputs"]])
def test_matches_golden_in_value_and_gradient(row):
    params, outputs = row["params"], expected(row)
    chosen = Chosen.of(row)
    logprobs_M = chosen.logprobs_BT[chosen.mask_BT]
    ours_M = estimate(params, logprobs_M, chosen.at["ref_log_prob"], chosen.at.get("importance_ratio"))
    chosen.check_tokens(ours_M, outputs["kl"], params["tol"])
    chosen.check_gradient(ours_M.sum(), outputs["grad_log_prob"], params["tol"])


def test_the_release_that_raises_is_the_only_row_left_out():
    assert [row["params"]["definition"] for row in rows("kl") if "error" in row["outputs"]] == [
        "k3_straight_through_k2_as_released"
    ]


@over(rows("mismatch_kl"))
def test_mismatch_matches_golden(row):
    chosen = Chosen.of(row)
    ours_M = kl.mismatch(chosen.at["log_prob"], chosen.at["rollout_log_prob"])
    chosen.check_tokens(ours_M, expected(row)["mismatch_kl"], row["params"]["tol"])


@over(rows("entropy"))
def test_entropy_matches_the_mathematics(row):
    outputs = row["outputs"]  # with a logit of -inf the peers return NaN
    theirs = tensor(outputs["mathematical"] if "mathematical" in outputs else outputs["entropy"])
    torch.testing.assert_close(kl.entropy(tensor(row["inputs"]["logits"])), theirs, rtol=1e-6, atol=1e-6)
