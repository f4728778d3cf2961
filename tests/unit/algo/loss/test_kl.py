import pytest
import torch

from algo.loss import kl


def test_estimates_of_a_known_divergence():
    """Sampled from p: k3 has the divergence as its mean, and the gradient of k2 has its gradient."""
    logits = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    logprobs = logits.log_softmax(-1)
    weights = logprobs.detach().exp()
    divergence = (logprobs.exp() * (logprobs - reference)).sum()
    (true_gradient,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    for estimator in (kl.k3, kl.k3_with_gradient_of_k2):
        assert (weights * estimator(logprobs, reference)).sum().item() == pytest.approx(divergence.item())
    for estimator in (kl.k2, kl.k3_with_gradient_of_k2):
        mean = (weights * estimator(logprobs, reference)).sum()
        (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
        torch.testing.assert_close(gradient, true_gradient)
