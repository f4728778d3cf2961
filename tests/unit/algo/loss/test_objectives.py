import math
from functools import partial

import pytest
import torch

from algo.loss import kl
from algo.loss.aggregate import mean_of_means, over_sequence, total
from algo.loss.corrections import icepop, token_ratios
from algo.loss.objectives import cispo, dppo, gspo, ppo_clip, reinforce, sapo, trusted
from tests.support.golden import Chosen, check, expected, name, rows


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


@pytest.mark.parametrize("row", rows("policy_loss"), ids=name)
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


def test_a_token_beyond_a_bound_has_no_gradient_and_bounds_are_separate():
    logprobs = torch.tensor([0.25, 0.24, -0.25, -0.2], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    ppo_clip(logprobs, torch.zeros_like(advantages), advantages, clip_low=0.2, clip_high=0.28).sum().backward()
    assert (logprobs.grad != 0).tolist() == [False, True, False, True]


def test_the_trust_region_stops_only_the_step_that_leads_out_of_it():
    probabilities = torch.tensor([0.9, 0.9, 0.1, 0.1], dtype=torch.float64)
    logprobs, advantages = probabilities.log(), torch.tensor([1.0, -1.0, 1.0, -1.0])
    rollout = torch.full_like(logprobs, 0.5).log()
    for divergence in ("tv", "kl"):
        inside = partial(trusted, logprobs, rollout, advantages, low=0.2, high=0.2, divergence=divergence)
        assert inside().tolist() == [False, True, True, False]
        assert inside(both_sides=True).tolist() == [False] * 4
        certain = torch.zeros(2)  # p = q = 1: the divergence of the two outcomes is 0 / 0 there
        assert trusted(certain, certain, advantages[:2], low=0, high=0, divergence=divergence).all()
        # what float32 rounds to p = 1 is as far from q as it is without rounding
        assert trusted(certain, certain - 1e-4, advantages[:2], low=0.01, high=0.01, divergence=divergence).all()


def test_the_two_gradients_of_gspo_agree_where_the_advantage_is_constant_in_a_sequence():
    rng = torch.Generator().manual_seed(0)
    sequence_M = torch.tensor([0, 0, 0, 2, 2])
    values_M = 0.1 * torch.randn(5, dtype=torch.float64, generator=rng)
    gradients = []
    for token_gradient in (False, True):
        logprobs_M = values_M.clone().requires_grad_()
        advantages_M = torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64)[sequence_M]
        losses_M = gspo(
            logprobs_M,
            torch.zeros_like(values_M),
            advantages_M,
            sequence_M,
            3,
            clip_low=0.2,
            clip_high=0.28,
            token_gradient=token_gradient,
        )
        mean_of_means(losses_M, sequence_M, 3, count=2).backward()
        gradients.append(logprobs_M.grad)
    torch.testing.assert_close(*gradients)


def test_a_sequence_far_above_its_clamp_stays_finite_and_has_no_gradient():
    logprobs_M = torch.tensor([60.0, 200.0], requires_grad=True)
    zeros_M, sequence_M = torch.zeros(2), torch.tensor([0, 0])
    losses_M = gspo(logprobs_M, zeros_M, zeros_M - 1, sequence_M, 1, clip_low=0.2, clip_high=0.28)
    losses_M.sum().backward()
    assert losses_M.tolist() == pytest.approx([math.exp(10)] * 2)
    assert logprobs_M.grad.tolist() == [0, 0]


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
