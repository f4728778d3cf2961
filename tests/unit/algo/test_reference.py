"""The KL to the model that training began with: value, gradient, adapters, resume. Two ranks: `algo_gradients`."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from algo.learner.config import LearnerConfig
from algo.learner.state.publish import full_state
from algo.learner.trainer import Trainer
from algo.loss.policy_losses import PpoClip
from tests.support.algo_fakes import CANARY, batch, write_checkpoint

CONFIG = LearnerConfig(
    threads=1, lr=1e-2, warmup_steps=0, minibatches=1, grad_clip=1e9, micro_batch_tokens=100, reference_kl_coef=0.5
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('store')}/s", rank=0, world_size=1)
    yield write_checkpoint(tmp_path_factory.mktemp("source") / "tiny")
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def trainer(checkpoint, tmp_path):
    def build(**fields):
        return Trainer(dataclasses.replace(CONFIG, **fields), checkpoint, CANARY, tmp_path / "weights", seed=5)

    return build


def targets(model, whole):
    """[M] log-probabilities of the sampled tokens of every trajectory, each in a pass of its own."""
    found, ends = [], np.cumsum(whole.lengths_B)
    for start, end in zip(ends - whole.lengths_B, ends, strict=True):
        ids_T = torch.from_numpy(whole.token_ids_N[start:end]).long()
        logprobs_T = model(ids_T[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids_T[1:, None]).squeeze(-1)
        found.append(logprobs_T[torch.from_numpy(whole.sampled_N[start + 1 : end])])
    return found


def gradients(subject, step):
    """(metrics, unsharded gradient by name) of a step's only update."""
    kept = {}

    def keep(*_):
        for name, parameter in subject.scorer.named_parameters():
            if parameter.grad is not None:
                kept[name.removeprefix("model.")] = parameter.grad.full_tensor().clone()

    handle = subject.optimizer.register_step_pre_hook(keep)
    metrics = subject.train(batch(7, step=step))
    handle.remove()
    return metrics, kept


def by_hand(kind, logprobs_M, reference_M):
    """Value and slope of an estimator written down from its definition."""
    log_ratio_M = reference_M - logprobs_M.detach()
    k3_M = log_ratio_M.exp() - 1 - log_ratio_M
    k2_M = log_ratio_M.square() / 2
    value_M = k2_M if kind == "k2" else k3_M
    slope_M = 1 - log_ratio_M.exp() if kind == "k3" else -log_ratio_M
    return value_M, slope_M


@pytest.mark.parametrize("kind", ["k2", "k3", "k3_with_gradient_of_k2"])
@pytest.mark.parametrize("aggregate", ["token", "sequence"])
def test_value_and_gradient_are_those_computed_by_hand(trainer, checkpoint, kind, aggregate):
    """After one update, so that learner and reference differ. A run without the KL gives the rest of the gradient."""
    fields = {"reference_kl": kind, "loss": PpoClip(aggregate=aggregate)}
    subject, bare = trainer(**fields), trainer(**fields, reference_kl_coef=0.0)
    for each in (subject, bare):
        each.train(batch(7, step=0))
    # The first update is the same: there the reference is the learner, and both value and slope are 0.
    weights = {name: weight.clone() for name, weight in full_state(bare.scorer).items()}
    for name, weight in full_state(subject.scorer).items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-5)
    subject.scorer.load_state_dict(bare.scorer.state_dict())

    learner, reference = (AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32) for _ in range(2))
    learner.load_state_dict(weights, strict=False)
    whole = batch(7, step=1)
    with torch.no_grad():
        reference_BT = targets(reference, whole)
    learner_BT = targets(learner, whole)
    tokens = sum(len(each) for each in learner_BT)
    loss, value, total = torch.zeros(()), 0.0, 0.0
    for logprobs_T, reference_T in zip(learner_BT, reference_BT, strict=True):
        value_T, slope_T = by_hand(kind, logprobs_T, reference_T)
        share = 1 / tokens if aggregate == "token" else 1 / (len(learner_BT) * len(logprobs_T))
        loss = loss + 0.5 * share * (slope_T * logprobs_T).sum()
        value += 0.5 * share * float(value_T.sum())
        total += float(value_T.sum())
    loss.backward()

    metrics, found = gradients(subject, step=1)
    without, rest = gradients(bare, step=1)
    assert total / tokens > 1e-3
    assert metrics["reference_kl"] == pytest.approx(total / tokens, rel=1e-3)
    assert metrics["loss"] - without["loss"] == pytest.approx(value, rel=1e-3, abs=1e-6)
    assert "reference_kl" not in without
    for name, parameter in learner.named_parameters():
        torch.testing.assert_close(found[name] - rest[name], parameter.grad, rtol=2e-3, atol=2e-6)


def test_a_run_is_pulled_back_to_the_model_it_began_with(trainer):
    """Ten updates on one batch: with a large coefficient the learner stays near."""
    far = []
    for coefficient in (1e-6, 10.0):
        subject = trainer(reference_kl_coef=coefficient, lr=1e-3)
        metrics = [subject.train(batch(16)) for _ in range(10)]
        assert metrics[0]["reference_kl"] == 0.0
        far.append(metrics[-1]["reference_kl"])
    assert far[1] < far[0] / 5


def test_the_reference_is_frozen_and_neither_optimized_nor_published_nor_kept_in_a_checkpoint(trainer, tmp_path):
    subject, bare = trainer(), trainer(reference_kl_coef=0.0)
    with subject.reference.scorer() as scorer:
        before = {name: weight.clone() for name, weight in full_state(scorer).items()}
    subject.train(batch(16))
    with subject.reference.scorer() as scorer:
        after = full_state(scorer)
        assert not any(parameter.requires_grad for parameter in scorer.parameters())
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert not any(torch.equal(weight, before[name]) for name, weight in full_state(subject.scorer).items())
    assert len(subject.trained) == len(bare.trained)
    for each, name in ((subject, "with"), (bare, "bare")):
        each.checkpoint(tmp_path / name, 1)
        each.checkpoints.wait()
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).glob("*.distcp")) for name in ("with", "bare")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)


def test_with_adapters_the_reference_is_the_model_without_them_and_no_copy(trainer):
    subject, bare = trainer(lora_rank=2), trainer(lora_rank=2, reference_kl_coef=0.0)
    before = bare.score(batch(16))
    metrics = [subject.train(batch(16)) for _ in range(3)]
    assert metrics[0]["reference_kl"] == 0.0
    assert metrics[1]["reference_kl"] > 0.0
    with subject.reference.scorer() as scorer:
        assert scorer is subject.scorer
        assert np.array_equal(subject.score(batch(16)), before)
    assert not np.array_equal(subject.score(batch(16)), before)


@pytest.mark.parametrize("fields", [{}, {"lora_rank": 2}])
def test_a_resumed_run_is_held_to_the_same_model(trainer, tmp_path, fields):
    first, second = trainer(**fields), trainer(**fields)
    for step in range(2):
        first.train(batch(16, step=step))
    first.checkpoint(tmp_path / "step-000002", 2)
    first.checkpoints.wait()
    wanted = [first.train(batch(16, step=step)) for step in (2, 3)]
    second.restore(tmp_path / "step-000002")
    found = [second.train(batch(16, step=step)) for step in (2, 3)]
    assert wanted[0]["reference_kl"] > 0
    for name in ("loss", "grad_norm", "reference_kl"):
        assert [metrics[name] for metrics in found] == [metrics[name] for metrics in wanted]


@pytest.mark.parametrize(("field", "value"), [("reference_kl_coef", -0.1), ("reference_kl", "k1")])
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(ValueError, match=rf"LearnerConfig\.{field} .*{value}"):
        LearnerConfig(**{field: value})
