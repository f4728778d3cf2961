"""One rank in this process: what must not change the update, and what must."""

import dataclasses
import weakref

import numpy as np
import pytest
import torch

from algo.learner.config import LearnerConfig
from algo.learner.learner import EMPTY_BATCHES, Fatal, Learner
from algo.learner.measure.divergence import Diverged
from algo.learner.model.loading import load, scatter
from algo.learner.pack import EMPTY, plan
from algo.learner.state.publish import full_state
from algo.learner.trainer import Trainer
from engine.learner import messages
from engine.types import Batch
from tests.support.algo_fakes import CANARY, batch, write_checkpoint

CONFIG = LearnerConfig(threads=1, lr=1e-3, micro_batch_tokens=2048)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture
def trainer(group, checkpoint, tmp_path):
    def build(config=CONFIG):
        return Trainer(config, checkpoint, CANARY, tmp_path, seed=5)

    return build


def weights(trainer):
    return torch.cat([tensor.flatten() for tensor in full_state(trainer.scorer).values()])


def test_same_batch_and_seed_give_the_same_weights_bit_by_bit(trainer):
    results = []
    for _ in range(2):
        subject = trainer()
        metrics = [subject.train(batch(16, step=step))["loss"] for step in range(2)]
        results.append((metrics, weights(subject)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def gradient(subject, minibatch):
    """Loss and unclipped gradient of one minibatch, through the trainer's own update with a learning rate of 0."""
    for parameters in subject.optimizer.param_groups:
        parameters["lr"] = 0.0
    kept = []

    def keep(*_):
        kept.extend(parameter.grad.to_local().flatten().clone() for parameter in subject.trained)

    handle = subject.optimizer.register_step_pre_hook(keep)
    result = subject.update(minibatch)
    handle.remove()
    return result["loss"], result["grad_norm"], torch.cat(kept)


def test_loss_and_gradient_do_not_depend_on_microbatching_or_empty_microbatches(trainer):
    subject = trainer(dataclasses.replace(CONFIG, grad_clip=1e9))
    whole = batch(16)
    results = []
    for tokens in (100_000, 200, 1):
        (minibatch,) = plan(whole, minibatches=1, micro_batch_tokens=tokens, ranks=1, seed=0)
        results.append(gradient(subject, minibatch))
    [cut] = plan(whole, minibatches=1, micro_batch_tokens=200, ranks=1, seed=0)
    filled = dataclasses.replace(cut, micros=(EMPTY, *reversed(cut.micros), EMPTY))
    assert filled.loss_tokens == whole.sampled_N.sum()
    results.append(gradient(subject, filled))
    for loss, norm, flat in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        assert norm == pytest.approx(results[0][1], rel=1e-5)
        torch.testing.assert_close(flat, results[0][2], rtol=1e-4, atol=1e-7)


def test_gradient_is_that_of_the_bare_model(trainer, checkpoint):
    from transformers import AutoModelForCausalLM

    subject = trainer(dataclasses.replace(CONFIG, grad_clip=1e9))
    whole = batch(5)
    (minibatch,) = plan(whole, minibatches=1, micro_batch_tokens=200, ranks=1, seed=0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ends = np.cumsum(whole.lengths_B)
    total = torch.zeros(())
    for end, length, advantage in zip(ends, whole.lengths_B, whole.advantages_B, strict=True):
        ids = torch.from_numpy(whole.token_ids_N[end - length : end]).long()
        mask = torch.from_numpy(whole.sampled_N[end - length + 1 : end])
        old = torch.from_numpy(whole.logprobs_N[end - length + 1 : end])
        new = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        ratio = (new - old)[mask].exp()
        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum()
    loss = total / int(whole.sampled_N.sum())
    loss.backward()
    expected = dict(model.named_parameters())
    names = [name.removeprefix("model.") for name, _ in subject.scorer.named_parameters()]
    found, _, flat = gradient(subject, minibatch)
    assert found == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(flat, torch.cat([expected[name].grad.flatten() for name in names]), rtol=1e-4, atol=1e-7)


def test_a_non_finite_value_leaves_the_weights_alone(trainer):
    subject = trainer()
    before = weights(subject)
    broken = batch(4)
    broken = Batch(step=0, **(broken.arrays() | {"advantages_B": np.full(4, np.inf, np.float32)}))
    with pytest.raises(Diverged, match="loss"):
        subject.train(broken)
    assert torch.equal(weights(subject), before)


def test_empty_batches_in_a_row_are_a_broken_run(trainer):
    learner = Learner()
    learner.trainer = trainer()
    for step in range(EMPTY_BATCHES - 1):
        learner.train(messages.Train(step=step, version=step + 1), batch(0).arrays())
    with pytest.raises(Fatal, match="10 batches in a row"):
        learner.train(messages.Train(step=9, version=10), batch(0).arrays())


class CountingHeap:
    trims = 0

    def trim(self):
        self.trims += 1


def test_each_step_gives_back_the_memory_that_it_leaves_free(trainer):
    subject = trainer()
    subject.heap = CountingHeap()
    for step in (1, 2):
        subject.train(batch(3, step=step))
    assert subject.heap.trims == 2


def test_weight_decay_pulls_at_matrices_and_neither_at_norms_nor_biases(trainer):
    """The first update of Adam moves each weight by the rate; decay is what differs."""
    found = []
    for decay in (0.0, 0.5):
        subject = trainer(dataclasses.replace(CONFIG, weight_decay=decay, minibatches=1, warmup_steps=0))
        before = full_state(subject.scorer)
        before = {name: weight.clone() for name, weight in before.items()}
        subject.train(batch(16))
        found.append(full_state(subject.scorer))
        found[-1] = {name: weight.clone() for name, weight in found[-1].items()}
    vectors = {name for name, weight in before.items() if weight.ndim == 1}
    assert vectors
    for name, weight in before.items():
        pulled = found[0][name] - found[1][name]
        wanted = torch.zeros_like(weight) if name in vectors else weight * CONFIG.lr * 0.5
        torch.testing.assert_close(pulled, wanted, rtol=0, atol=2e-7)


def test_a_larger_eps_of_adam_makes_a_smaller_step(trainer):
    moved = []
    for eps in (1e-8, 1.0):
        subject = trainer(dataclasses.replace(CONFIG, adam_eps=eps))
        before = weights(subject).clone()
        subject.train(batch(16))
        moved.append(float((weights(subject) - before).abs().max()))
    assert moved[1] < moved[0] / 10


def test_each_weight_is_forgotten_as_it_goes_to_its_shards(group, checkpoint):
    """Else whoever reads the checkpoint holds all of it twice, and a rank's GPU more than its shards."""
    scorer, _ = load(CONFIG, checkpoint)
    parts = [*scorer.named_parameters(), *scorer.named_buffers()]
    whole = {name: getattr(part, "_local_tensor", part).detach().clone() for name, part in parts}
    tensors = [weakref.ref(tensor) for tensor in whole.values()]
    alive = []

    class Watched(dict):
        def pop(self, name):
            alive.append(sum(tensor() is not None for tensor in tensors))
            return super().pop(name)

    given = Watched(whole)
    whole.clear()
    scatter(scorer, given)
    assert given == {}
    assert alive == list(range(len(tensors), 0, -1))
