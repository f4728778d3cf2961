import math
from functools import partial

import pytest
import torch

from algo.loss.aggregate import mean_of_means
from algo.loss.objectives import gspo, ppo_clip, trusted


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
