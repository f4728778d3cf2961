"""The divergence from a teacher's likeliest tokens, and the scores that it is made of."""

import pytest
import torch

from algo.learner.model.scorer import LogProb
from algo.loss.distillation import TopK, divergence
from algo.loss.interface import Tokens, Totals
from algo.loss.policy_losses import Correction, PpoClip


def logits(seed, vocabulary=13, positions=6):
    return torch.randn(positions, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kl(first, second):
    return (first.exp() * (first - second)).sum(-1)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_with_all_tokens_but_one_it_is_the_divergence_over_the_vocabulary(direction):
    student, teacher = logits(1).log_softmax(-1), logits(2).log_softmax(-1)
    whole = kl(student, teacher) if direction == "reverse" else kl(teacher, student)
    torch.testing.assert_close(divergence(student[:, :-1], teacher[:, :-1], direction), whole, rtol=1e-6, atol=1e-9)
    few = divergence(student[:, :2], teacher[:, :2], direction)
    assert (few >= 0).all()
    assert (few <= whole + 1e-9).all(), "fewer events tell less apart"


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_student_like_its_teacher_has_no_divergence_and_no_gradient(direction):
    student = logits(1).log_softmax(-1)[:, :4].requires_grad_()
    result = divergence(student, student.detach(), direction)
    result.sum().backward()
    assert result.abs().max() < 1e-9
    whole = logits(1).requires_grad_()
    divergence(whole.log_softmax(-1)[:, :4], student.detach(), direction).sum().backward()
    assert whole.grad.abs().max() < 1e-6


def test_a_certain_student_has_a_finite_divergence():
    certain = torch.tensor([[0.0, -1e4]], requires_grad=True)
    result = divergence(certain, torch.tensor([[-2.0, -1.0]]), "reverse")
    result.sum().backward()
    assert result.isfinite().all()
    assert certain.grad.isfinite().all()


def test_a_filler_has_a_loss_of_0_and_tokens_without_a_teacher_are_refused():
    tokens = Tokens(
        logprobs_M=torch.zeros(0, requires_grad=True),
        old_logprobs_M=torch.zeros(0),
        advantages_M=torch.zeros(0),
        sequence_M=torch.zeros(0, dtype=torch.int64),
        sequences=1,
        versions_M=torch.zeros(0, dtype=torch.int32),
    )
    loss, counts = TopK()(tokens, Totals(4, 1))
    assert loss.requires_grad
    assert (loss.item(), counts["teacher_kl"].item()) == (0.0, 0.0)
    with pytest.raises(ValueError, match="teacher_ids_NK"):
        TopK()(tokens._replace(logprobs_M=torch.zeros(2, requires_grad=True)), Totals(4, 1))
    with pytest.raises(ValueError, match="normalize"):
        TopK(policy=PpoClip(proximal=True, correction=Correction(normalize=True)))


def test_several_tokens_of_a_position_are_scored_with_their_gradients():
    given = logits(3).float()
    targets = torch.randint(0, 13, (6, 4), generator=torch.Generator().manual_seed(0))
    weights = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    ours, theirs = given.clone().requires_grad_(), given.clone().requires_grad_()
    logprobs, entropy = LogProb.apply(ours * 1.0, targets)
    expected = theirs.log_softmax(-1).gather(-1, targets)
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    one, again = LogProb.apply(given.clone(), targets[:, 0])
    assert torch.equal(one, logprobs[:, 0])
    assert torch.equal(again, entropy)
