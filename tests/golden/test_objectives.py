"""Each token's objective against the peers."""

from functools import partial

import pytest

from algo.loss import kl
from algo.loss.aggregate import mean_of_means, over_sequence, total
from algo.loss.corrections import icepop, token_ratios
from algo.loss.objectives import cispo, dppo, gspo, ppo_clip, reinforce, sapo
from tests.support.golden import Chosen, check, expected, over, rows


def clip(params):
    return {"clip_low": params["eps_low"], "clip_high": params["eps_high"]}


def ppo(params, row, objective=ppo_clip):
    at = row.at
    extra = {} if objective is cispo else {"dual_clip": params.get("dual_clip_c")}
    clamp = params.get("log_ratio_clamp")
    return objective(at["log_prob"], at["old_log_prob"], at["advantages"], **clip(params), **extra, clamp=clamp)


def ppo_minus_kl(params, row):
    penalty = kl.k3(row.at["log_prob"], row.at["ref_log_prob"], clamp=10.0, result_clamp=None)
    return ppo(params, row) + params["kl_coef"] * penalty


def sequence_ratio(params, row):
    advantages = row.at["advantages"]
    if params.get("advantage") == "mean over the sequence":
        advantages = over_sequence(advantages, row.sequence_M, row.sequences, "mean")[row.sequence_M]
    return gspo(
        row.at["log_prob"],
        row.at["old_log_prob"],
        advantages,
        row.sequence_M,
        row.sequences,
        **clip(params),
        token_gradient=params["definition"] == "gspo",
        clamp=params["seq_log_clamp_max"],
    )


def trust_region(params, row):
    symmetric = params.get("threshold")
    return dppo(
        row.at["log_prob"],
        row.at["rollout_log_prob"],
        row.at["advantages"],
        low=params.get("mask_low", params.get("delta_low", symmetric)),
        high=params.get("mask_high", params.get("delta_high", symmetric)),
        divergence="kl" if params["definition"] == "dppo_binary_kl" else "tv",
        both_sides=symmetric is not None,
        square_coef=params.get("kl_tau", 0.0),
        clamp=params.get("log_ratio_clamp"),
    )


def rollout_weighted(params, row):
    ratios = token_ratios(row.at["log_prob"], row.at["rollout_log_prob"], params["log_ratio_clamp"])
    weights = icepop(ratios, 1 - params["eps_low"], 1 + params["eps_high"])
    return reinforce(row.at["log_prob"], row.at["advantages"], weights)


def truncated_reinforce(params, row):
    ratios = token_ratios(row.at["log_prob"], row.at["old_log_prob"], clamp=None)
    return reinforce(row.at["log_prob"], row.at["advantages"], ratios.clamp(max=1 + params["eps_high"]))


def smooth(params, row):
    taus = {"tau_positive": params["tau_pos"], "tau_negative": params["tau_neg"]}
    return sapo(row.at["log_prob"], row.at["old_log_prob"], row.at["advantages"], **taus)


OBJECTIVES = {
    "ppo_clip": ppo,
    "ppo_dual_clip": ppo,
    "ppo_clip_minus_kl": ppo_minus_kl,
    "gspo": sequence_ratio,
    "gspo_sequence_gradient": sequence_ratio,
    "cispo": partial(ppo, objective=cispo),
    "dppo_tv_plus_kl": trust_region,
    "dppo_binary_tv": trust_region,
    "dppo_binary_kl": trust_region,
    "ipo_tv": trust_region,
    "rollout_is_zero_outside": rollout_weighted,
    "reinforce_truncated_ratio": truncated_reinforce,
    "sapo": smooth,
}


def reduced(params, row, losses_M):
    """The loss in the peer's own average, by the name of its output."""
    tokens = max(1, int(row.mask_BT.sum()))
    nonempty = int(row.mask_BT.any(1).sum())
    sequence_means = partial(mean_of_means, losses_M, row.sequence_M, row.sequences)
    return {
        "token-mean": {"loss": total(losses_M, tokens)},
        "token mean": {"loss": total(losses_M, tokens)},
        "token mean over own mask count": {"loss": total(losses_M, tokens)},
        "masked sum": {"loss": total(losses_M, 1)},
        "seq-mean-token-mean": {"loss": sequence_means(nonempty)},
        "sum / global token count": {"loss": total(losses_M, params.get("global_tokens", 1))},
        "sum / batch_size": {"loss": total(losses_M, params.get("batch_size", 1))},
        "sum over tokens": {"loss_sum_of_tokens": total(losses_M, 1)},
        "sum over sequences of token mean": {"loss_sum_of_seq_means": sequence_means(1)},
        "sum over sequences of token mean; sum over tokens": {
            "loss_sum_of_seq_means": sequence_means(1),
            "loss_sum_of_tokens": total(losses_M, 1),
        },
    }[params["reduction"]]


@over(rows("policy_loss"))
def test_matches_golden_in_every_token_loss_and_gradient(row):
    params, outputs, tolerance = row["params"], expected(row), row["params"]["tol"]
    chosen = Chosen.of(row)
    chosen.at["log_prob"] = chosen.logprobs_BT[chosen.mask_BT]
    losses_M = OBJECTIVES[params["definition"]](params, chosen)
    if "per_token" in outputs:
        chosen.check_tokens(losses_M, outputs["per_token"], tolerance)
    losses = reduced(params, chosen, losses_M)
    for key, loss in losses.items():
        check(loss, outputs[key], tolerance)
    chosen.check_gradient(next(iter(losses.values())), outputs["grad_log_prob"], tolerance)


@pytest.mark.parametrize("definition", sorted(OBJECTIVES))
def test_no_position_gives_zero_attached_to_the_graph(definition):
    row = rows("policy_loss", definition=definition)[0]
    row["inputs"]["mask"] = [[0.0] * len(sequence) for sequence in row["inputs"]["mask"]]
    chosen = Chosen.of(row)
    chosen.at["log_prob"] = chosen.logprobs_BT[chosen.mask_BT]
    loss = total(OBJECTIVES[definition](row["params"], chosen), 1)
    assert loss.item() == 0
    chosen.check_gradient(loss, [0.0], 0)


@pytest.mark.parametrize("definition", sorted(OBJECTIVES))
def test_a_value_that_is_not_finite_where_there_is_loss_reaches_the_loss(definition):
    row = rows("policy_loss", definition=definition, case="basic")[0]
    row["inputs"]["log_prob"][0][0] = "nan"
    chosen = Chosen.of(row)
    assert chosen.mask_BT[0, 0]
    assert total(OBJECTIVES[definition](row["params"], chosen), 1).isnan()
