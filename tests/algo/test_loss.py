import pytest
import torch
from algo_golden import expected, name, rows, tensor

from algo.loss import policy_loss


@pytest.mark.parametrize("row", rows("policy_loss", definition="ppo_clip", peer="verl"), ids=name)
def test_matches_golden_in_loss_and_gradient(row):
    params, outputs = row["params"], expected(row)
    inputs = {key: tensor(value) for key, value in row["inputs"].items()}
    logprobs = inputs["log_prob"].requires_grad_()
    mask = inputs["mask"].bool()
    loss, sums = policy_loss(
        logprobs,
        inputs["old_log_prob"],
        inputs["advantages"],
        mask,
        clip_low=params["eps_low"],
        clip_high=params["eps_high"],
        total_tokens=mask.sum(),
    )
    loss.backward()
    assert loss.item() == pytest.approx(outputs["loss"], rel=params["tol"], abs=params["tol"])
    torch.testing.assert_close(logprobs.grad, tensor(outputs["grad_log_prob"]), rtol=params["tol"], atol=params["tol"])
    clipped = (sums.clip_low + sums.clip_high) / sums.tokens
    assert clipped.item() == pytest.approx(outputs["clip_frac"], abs=1e-9)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_masked_values_change_neither_loss_nor_gradient_nor_metrics(poison):
    mask = torch.tensor([True, False, True])
    results = []
    for masked in (0.0, poison):
        logprobs = torch.tensor([-1.0, masked, -2.0], dtype=torch.float64, requires_grad=True)
        old = torch.tensor([-1.2, masked, -1.5], dtype=torch.float64)
        advantages = torch.tensor([1.0, masked, -1.0], dtype=torch.float64)
        loss, sums = policy_loss(logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.28, total_tokens=2)
        loss.backward()
        results.append(torch.cat([loss.detach()[None], logprobs.grad, torch.stack([part.double() for part in sums])]))
    assert torch.equal(results[0], results[1])
    assert results[0].isfinite().all()


def test_bounds_are_separate_and_clipped_tokens_carry_no_gradient():
    logprobs = torch.tensor([0.25, 0.24, -0.25, -0.2], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    old = torch.zeros_like(advantages)
    loss, sums = policy_loss(logprobs, old, advantages, clip_low=0.2, clip_high=0.28, total_tokens=4)
    loss.backward()
    assert (logprobs.grad != 0).tolist() == [False, True, False, True]
    assert (int(sums.clip_high), int(sums.clip_low)) == (1, 1)


@pytest.mark.parametrize("mask", [torch.zeros(3, dtype=torch.bool), None])
def test_empty_mask_gives_zero_attached_to_the_graph(mask):
    logprobs = torch.full((3 if mask is not None else 0,), -1.0, requires_grad=True)
    values = torch.zeros_like(logprobs).detach()
    loss, sums = policy_loss(logprobs, values, values + 1, mask, clip_low=0.2, clip_high=0.28, total_tokens=7)
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad is not None
    assert not logprobs.grad.any()
    assert [float(part) for part in sums] == [0.0] * len(sums)
