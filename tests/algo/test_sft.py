"""Supervised fine-tuning: only marked tokens are learnt, nothing of the stream is lost, a bad loss stops the run."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from algo.sft import Example, SftConfig, collate, fit, masked_loss


class Bigram(nn.Module):
    """The smallest causal model: the next token depends on this one alone."""

    def __init__(self, vocabulary=8):
        super().__init__()
        self.table = nn.Embedding(vocabulary, vocabulary)
        self.seen = []

    def forward(self, input_ids):
        self.seen.append(input_ids)
        return SimpleNamespace(logits=self.table(input_ids))


def counting(length, start=0):
    """start, start+1, ... modulo 8; all but the first token is learnt."""
    ids = [(start + n) % 8 for n in range(length)]
    return Example(ids_T=ids, loss_T=[False] + [True] * (length - 1))


def test_loss_falls_to_nothing_on_a_learnable_rule():
    torch.manual_seed(0)
    stream = (counting(4 + n % 5, start=n % 8) for n in itertools.count())
    losses = fit(Bigram(), stream, SftConfig(steps=60, batch_size=8, lr=0.3, warmup_steps=5))
    assert len(losses) == 60
    assert losses[0] > 1.5
    assert losses[-1] < 0.05


def test_unmarked_tokens_give_no_gradient():
    model = Bigram()
    example = Example(ids_T=[1, 2, 3, 4], loss_T=[False, False, False, True])
    summed, learnt = masked_loss(model, [example], torch.device("cpu"))
    summed.backward()
    assert learnt == 1
    touched = model.table.weight.grad.abs().sum(1) > 0
    assert touched.nonzero().flatten().tolist() == [3], "only the row that predicts the marked token"


def test_padding_is_not_learnt():
    ids_BT, loss_BT = collate([counting(3), counting(5)])
    assert ids_BT.tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4]]
    assert loss_BT.tolist() == [[False, True, True, False, False], [False, True, True, True, True]]


def test_constant_normaliser_weighs_every_token_alike():
    """With lr so small that weights hardly move, the update direction shows the weight of each token."""

    def gradient_of(example, tokens_per_example):
        torch.manual_seed(0)
        model = Bigram()
        norms = []
        model.table.weight.register_hook(lambda gradient: norms.append(gradient.sum(0).norm().item()))
        config = SftConfig(steps=1, batch_size=1, lr=1e-9, tokens_per_example=tokens_per_example, max_grad_norm=1e9)
        fit(model, [example], config)
        return norms[0]

    once, twice = Example(ids_T=[1, 2], loss_T=[False, True]), Example(ids_T=[1, 2, 1, 2], loss_T=[False, True] * 2)
    assert gradient_of(twice, None) == pytest.approx(gradient_of(once, None))
    assert gradient_of(twice, 10) == pytest.approx(2 * gradient_of(once, 10))


def test_batches_are_of_similar_length_and_nothing_is_lost():
    model = Bigram()
    lengths = [3, 9, 4, 8, 3, 9, 4, 8]
    losses = fit(model, [counting(n) for n in lengths], SftConfig(steps=99, batch_size=2, lr=1e-9, pool_batches=4))
    assert len(losses) == 4, "stops when the stream ends"
    assert sorted(tuple(ids.shape) for ids in model.seen) == [(2, 3), (2, 4), (2, 8), (2, 9)]


def test_learning_rate_rises_stays_and_falls():
    config = SftConfig(steps=100, batch_size=1, lr=1.0, warmup_steps=10, decay_from=0.6, floor=0.05)
    assert config.lr_factor(0) == pytest.approx(0.1)
    assert config.lr_factor(9) == config.lr_factor(59) == 1.0
    assert config.lr_factor(80) == pytest.approx(0.5)
    assert config.lr_factor(99) == pytest.approx(0.05)


def test_same_seed_same_losses():
    def run():
        torch.manual_seed(3)
        return fit(Bigram(), (counting(4 + n % 5) for n in range(64)), SftConfig(steps=8, batch_size=8, lr=0.1, seed=5))

    assert run() == run()


def test_a_loss_that_is_not_finite_stops_the_run():
    model = Bigram()
    with torch.no_grad():
        model.table.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="nan"):
        fit(model, [counting(4)], SftConfig(steps=1, batch_size=1, lr=0.1))


def test_wrong_values_are_refused_by_name():
    with pytest.raises(ValueError, match=r"SftConfig.batch_size must be positive, not 0"):
        SftConfig(steps=1, batch_size=0, lr=0.1)
    with pytest.raises(ValueError, match="2 ids but 1 loss marks"):
        Example(ids_T=[1, 2], loss_T=[True])
