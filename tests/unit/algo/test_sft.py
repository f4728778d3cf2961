"""Supervised fine-tuning: what is learnt, that nothing of the stream is lost, and that it is plain cross-entropy."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from algo.learner.config import LearnerConfig
from algo.learner.learner import Learner
from algo.learner.state.publish import full_state
from algo.learner.trainer import Trainer
from algo.loss.policy_losses import CrossEntropy
from algo.sft import Example, batches, to_batch
from engine.learner import messages
from tests.support.algo_fakes import write_checkpoint

CONFIG = LearnerConfig(
    threads=1,
    lr=3e-3,
    warmup_steps=5,
    schedule="linear",
    steps=30,
    decay_from=0.6,
    minibatches=1,
    loss=CrossEntropy(),
)


def counting(length, start=0):
    """start, start+1, ... modulo 8; all but the first two tokens are learnt."""
    ids = [(start + n) % 8 for n in range(length)]
    return Example(ids_T=ids, loss_T=[False] * 2 + [True] * (length - 2))


def lengths(found):
    return [batch.lengths_B.tolist() for batch in found]


# Batches


def test_batches_are_of_similar_length_and_nothing_is_lost():
    stream = [counting(n, start=index) for index, n in enumerate([3, 9, 4, 8, 3, 9, 4, 8, 5])]
    found = list(batches(stream, batch_size=2, seed=0, pool_batches=4))
    assert sorted(lengths(found[:4])) == [[3, 3], [4, 4], [8, 8], [9, 9]]
    assert lengths(found[4:]) == [[5]], "what is left when the stream ends"
    assert [batch.step for batch in found] == [1, 2, 3, 4, 5]
    trained = [ids for batch in found for ids in np.split(batch.token_ids_N, batch.lengths_B.cumsum()[:-1])]
    assert sorted(ids.tolist() for ids in trained) == sorted(list(example.ids_T) for example in stream)


def test_the_order_depends_on_the_seed_only():
    def order(seed):
        return lengths(batches((counting(4 + n % 7) for n in range(64)), batch_size=4, seed=seed, pool_batches=4))

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_an_endless_stream_is_read_a_pool_at_a_time():
    stream = (counting(4) for _ in itertools.count())
    assert len(next(batches(stream, batch_size=2, seed=0)).lengths_B) == 2
    assert sum(1 for _ in itertools.islice(stream, 3)) == 3


def test_nothing_sampled_the_tokens_of_an_example():
    batch = to_batch(7, [counting(4), counting(3)])
    assert batch.sampled_N.tolist() == [False, False, True, True, False, False, True]
    assert set(batch.versions_N.tolist()) == {-1}
    assert set(batch.logprobs_N.tolist()) == {0.0}


def test_wrong_values_are_refused_by_name():
    with pytest.raises(ValueError, match=r"batch_size .*got 0"):
        next(batches([], batch_size=0, seed=0))
    with pytest.raises(ValueError, match=r"LearnerConfig.decay_from .*got 1.0"):
        LearnerConfig(decay_from=1.0)


# On the learner


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    checkpoint = write_checkpoint(folder / "tiny")
    threads = torch.get_num_threads()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    yield lambda **fields: Trainer(dataclasses.replace(CONFIG, **fields), checkpoint, [], folder, seed=5)
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def test_the_loss_falls_on_a_learnable_rule_with_the_rate_of_the_schedule(trainer):
    subject = trainer()
    stream = (counting(4 + n % 5, start=n % 8) for n in itertools.count())
    steps = [subject.train(batch) for batch in itertools.islice(batches(stream, batch_size=8, seed=0), 30)]
    assert steps[0]["nll"] > 5
    assert steps[-1]["nll"] < 1
    assert [step["lr"] for step in steps] == [CONFIG.lr_at(batch) for batch in range(1, 31)]
    assert steps[0]["lr"] < steps[4]["lr"] == steps[17]["lr"] > steps[29]["lr"]


def test_weights_that_nobody_samples_with_are_not_published(trainer):
    learner = Learner()
    learner.trainer = trainer()
    trained, arrays = learner.train(messages.Train(step=1, version=0), to_batch(1, [counting(5)]).arrays())
    assert (trained.weights, arrays["canary"].size) == ("", 0)
    assert "staleness_mean" not in trained.metrics
    trained, _ = learner.train(messages.Train(step=2, version=1), to_batch(2, [counting(5)]).arrays())
    assert trained.weights


@pytest.mark.parametrize("per_example", [None, 3.0])
def test_the_update_is_that_of_the_bare_models_padded_cross_entropy(trainer, per_example):
    """One step of plain SGD in AdamW's place, so that the size of the gradient shows."""
    subject = trainer(loss=CrossEntropy(aggregate=per_example or "token"), grad_clip=1e9)
    examples = [counting(5), counting(12, start=3), counting(3)]
    before = {name: weight.clone() for name, weight in full_state(subject.scorer).items()}
    subject.optimizer = torch.optim.SGD(subject.scorer.parameters(), lr=0.1)
    metrics = subject.train(to_batch(1, examples))
    moved = {name: weight - before[name] for name, weight in full_state(subject.scorer).items()}
    bare = AutoModelForCausalLM.from_pretrained(subject.source, dtype=torch.float32)
    ids = pad_sequence([torch.tensor(example.ids_T) for example in examples], batch_first=True)
    marks = [torch.tensor(example.loss_T) for example in examples]
    labels = torch.where(pad_sequence(marks, batch_first=True), ids, -100)
    logits = bare(input_ids=ids).logits[:, :-1].flatten(0, 1)
    summed = functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    tokens = int((labels[:, 1:] != -100).sum())
    assert metrics["nll"] == pytest.approx(summed.item() / tokens, rel=1e-5)
    (summed / (tokens if per_example is None else 3 * per_example)).backward()
    for name, weight in bare.named_parameters():
        torch.testing.assert_close(moved[name], -metrics["lr"] * weight.grad, rtol=1e-3, atol=1e-7)
