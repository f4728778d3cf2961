"""What the learner notes of single tokens: of the rows asked for, as they were, and without changing anything."""

import dataclasses

import numpy as np
import pytest
import torch

from algo.learner.config import LearnerConfig
from algo.learner.learner import Learner
from algo.learner.measure.tokens import NAMES
from algo.learner.state.publish import full_state
from algo.learner.trainer import Trainer
from algo.loss.policy_losses import PpoClip
from engine.learner import messages
from engine.types import Batch
from tests.support.algo_fakes import CANARY, batch, with_prefix, write_checkpoint

CONFIG = LearnerConfig(threads=1, lr=1e-3, micro_batch_tokens=100)


@pytest.fixture
def trainer(group, tmp_path):
    checkpoint = write_checkpoint(tmp_path / "tiny")

    def build(**fields):
        return Trainer(dataclasses.replace(CONFIG, **fields), checkpoint, CANARY, tmp_path, seed=5)

    return build


def of_rows(whole, values_N, rows):
    """The parts of an array on N that belong to these rows, one after another."""
    ends_B = np.cumsum(whole.lengths_B)
    return np.concatenate([values_N[ends_B[row] - whole.lengths_B[row] : ends_B[row]] for row in rows])


def sampled_near(subject, whole, spread=0.3):
    """The batch as if weights near those of the learner had sampled it."""
    rng = np.random.default_rng(0)
    noise_N = rng.normal(0, spread, len(whole.token_ids_N)).astype(np.float32)
    logprobs_N = np.where(whole.sampled_N, subject.score(whole) + noise_N, 0).astype(np.float32)
    return Batch(step=whole.step, **(whole.arrays() | {"logprobs_N": logprobs_N}))


@pytest.mark.parametrize("prefix", [[], list(range(1, 81))], ids=["alone", "with a common beginning"])
def test_the_log_probabilities_of_the_rows_are_noted_as_they_were_before_the_update(trainer, prefix):
    subject, rows = trainer(minibatches=1), (1, 4, 5)
    whole = with_prefix(batch(9), prefix)
    before_N, sampled_N = subject.score(whole), of_rows(whole, whole.sampled_N, rows)
    subject.train(whole, None, rows)
    assert np.isnan(subject.noted["logprobs"]).tolist() == (~sampled_N).tolist()
    np.testing.assert_allclose(
        subject.noted["logprobs"][sampled_N], of_rows(whole, before_N, rows)[sampled_N], atol=1e-5
    )
    assert (subject.noted["entropy"][sampled_N] > 0).all()


def test_the_push_is_the_advantage_times_the_ratio_and_nothing_where_that_was_clipped(trainer):
    subject, rows = trainer(minibatches=1, loss=PpoClip(clip_low=0.2, clip_high=0.28, dual_clip=None)), tuple(range(9))
    whole = sampled_near(subject, batch(9))
    sampled_N = whole.sampled_N
    ratio_N = np.exp(subject.score(whole) - whole.logprobs_N)[sampled_N]
    advantage_N = np.repeat(whole.advantages_B, whole.lengths_B)[sampled_N]
    clipped_N = np.where(advantage_N > 0, ratio_N > 1.28, ratio_N < 0.8)
    subject.train(whole, None, rows)
    logprob_gradient_N = subject.noted["logprob_gradient"][sampled_N]
    assert 0.05 < clipped_N.mean() < 0.5
    assert ((logprob_gradient_N == 0) == clipped_N).all()
    np.testing.assert_allclose(logprob_gradient_N[~clipped_N], (ratio_N * advantage_N)[~clipped_N], rtol=1e-3)


def test_each_token_has_the_number_of_its_minibatch(trainer):
    subject, rows = trainer(minibatches=3), tuple(range(12))
    whole = batch(12)
    subject.train(whole, None, rows)
    minibatch_N = subject.noted["minibatch"]
    ends_B = np.cumsum(whole.lengths_B)
    found = [
        set(minibatch_N[end - length : end][whole.sampled_N[end - length : end]])
        for end, length in zip(ends_B, whole.lengths_B, strict=True)
    ]
    assert all(len(numbers) == 1 for numbers in found), "a row is in one minibatch"
    assert set.union(*found) == {0.0, 1.0, 2.0}


def test_it_changes_no_bit_of_the_weights_and_nothing_is_noted_unless_asked(trainer):
    found = []
    for rows in ((), (0, 3)):
        subject = trainer(minibatches=2)
        metrics = subject.train(batch(12), None, rows)
        weights = torch.cat([tensor.flatten() for tensor in full_state(subject.scorer).values()])
        found.append((metrics["loss"], metrics["grad_norm"], weights))
        assert bool(subject.noted) == bool(rows)
        subject.train(batch(12, step=1))
        assert subject.noted == {}
    assert found[0][:2] == found[1][:2]
    assert torch.equal(found[0][2], found[1][2])


def test_they_follow_the_canary_in_the_learners_answer(trainer):
    learner = Learner()
    learner.trainer = trainer(minibatches=2)
    whole = batch(12)
    _, arrays = learner.train(messages.Train(step=0, version=1, rows=(2,)), whole.arrays())
    assert {name: len(array) for name, array in arrays.items() if name != "canary"} == dict.fromkeys(
        NAMES, whole.lengths_B[2]
    )
    _, arrays = learner.train(messages.Train(step=1, version=2), whole.arrays())
    assert set(arrays) == {"canary"}
