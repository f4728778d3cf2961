"""Losses in the real trainer, one rank in this process: gradients, cuts, the proximal policy, refused steps."""

import dataclasses
import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from algo.learner.config import LearnerConfig
from algo.learner.learner import Fatal, Learner
from algo.learner.measure.divergence import Diverged, Mismatched, TokenPlace
from algo.learner.pack import EMPTY, plan
from algo.learner.state.publish import full_state
from algo.learner.trainer import Trainer
from algo.loss.distillation import TopK
from algo.loss.interface import Tokens, Totals
from algo.loss.policy_losses import Cispo, Correction, CrossEntropy, Dppo, Gspo, PpoClip, Sapo
from engine.learner import messages
from engine.types import Batch
from tests.support.algo_fakes import CANARY, batch, with_prefix, write_checkpoint

CONFIG = LearnerConfig(threads=1, lr=1e-3, micro_batch_tokens=2048, grad_clip=1e9)
LOSSES = [
    PpoClip(),
    PpoClip(
        aggregate="sequence",
        sampler_kl_coef=0.1,
        correction=Correction(level="geometric", kind="mask", lower=0.95, upper=1.05),
    ),
    PpoClip(proximal=True, correction=Correction(level="token", upper=1.1), aggregate=40.0),
    Gspo(clip_low=0.02, clip_high=0.02),
    Cispo(clip_low=0.1, clip_high=0.1),
    Dppo(low=1e-4, high=1e-4),
    Sapo(),
    CrossEntropy(aggregate="sequence"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def shared(group, checkpoint, tmp_path_factory):
    """One trainer whose loss a test sets and whose weights no test changes."""
    return Trainer(CONFIG, checkpoint, CANARY, tmp_path_factory.mktemp("weights"), seed=5)


@pytest.fixture
def trainer(group, checkpoint, tmp_path):
    def build(**fields):
        return Trainer(dataclasses.replace(CONFIG, **fields), checkpoint, CANARY, tmp_path, seed=5)

    return build


def weights(trainer):
    return torch.cat([tensor.flatten() for tensor in full_state(trainer.scorer).values()])


def gradient(subject, loss, minibatch):
    """Loss and gradient of one minibatch through the trainer's own update, with a learning rate of 0."""
    subject.loss, subject.proximal = loss, getattr(loss, "proximal", False)
    subject.normalizes = getattr(loss, "normalizes", False)
    for parameters in subject.optimizer.param_groups:
        parameters["lr"] = 0.0
    kept = []

    def keep(*_):
        kept.extend(parameter.grad.to_local().flatten().clone() for parameter in subject.trained)

    handle = subject.optimizer.register_step_pre_hook(keep)
    result = subject.update(minibatch)
    handle.remove()
    return result, torch.cat(kept)


def spread(whole, share=0.1):
    """The batch with the sampler's log-probabilities near those of a model that is uniform: some tokens clip."""
    noise = np.random.default_rng(7).normal(size=len(whole.token_ids_N)) * share
    return Batch(step=whole.step, **(whole.arrays() | {"logprobs_N": (whole.logprobs_N + noise).astype(np.float32)}))


@pytest.fixture(scope="module")
def bare(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def bare_tokens(model, whole):
    """What the loss must see, from the Hugging Face model on one trajectory after another."""
    parts = []
    ends = np.cumsum(whole.lengths_B)
    for number, (end, length) in enumerate(zip(ends, whole.lengths_B, strict=True)):
        ids = torch.from_numpy(whole.token_ids_N[end - length : end]).long()
        mask = torch.from_numpy(whole.sampled_N[end - length + 1 : end])
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)[mask]
        old = torch.from_numpy(whole.logprobs_N[end - length + 1 : end])[mask]
        advantages = torch.full_like(old, float(whole.advantages_B[number]))
        parts.append((logprobs, old, advantages, torch.full_like(old, number, dtype=torch.long)))
    logprobs_M, old_M, advantages_M, sequence_M = (torch.cat(columns) for columns in zip(*parts, strict=True))
    counted = {"sequences": len(whole.lengths_B), "versions_M": torch.zeros_like(sequence_M)}
    return Tokens(logprobs_M, old_M, advantages_M, sequence_M, **counted, proximal_logprobs_M=logprobs_M.detach())


@pytest.mark.parametrize("also", [None, Correction(kind="mask", lower=0.95, upper=1.05)], ids=["clamp", "mask too"])
@pytest.mark.parametrize("micro_batch_tokens", [50, 4096])
def test_normalised_weights_have_a_mean_of_one_over_the_minibatch(shared, bare, also, micro_batch_tokens):
    whole = spread(batch(12))
    correction = Correction(lower=0.97, upper=1.02, also=also)
    weights_M = correction.weights(bare_tokens(bare, whole))
    mean = float(weights_M.sum() / (weights_M > 0).sum())
    assert abs(mean - 1) > 1e-3
    (minibatch,) = plan(whole, minibatches=1, micro_batch_tokens=micro_batch_tokens, ranks=1, seed=0)
    plain, normalised = (
        gradient(shared, PpoClip(proximal=True, correction=each), minibatch)
        for each in (correction, dataclasses.replace(correction, normalize=True))
    )
    torch.testing.assert_close(normalised[1], plain[1] / mean, rtol=1e-4, atol=1e-8)
    assert normalised[0]["loss"] == pytest.approx(plain[0]["loss"] / mean, rel=1e-4)
    assert normalised[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"] / mean, rel=1e-4)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{type(loss).__name__}-{loss.aggregate}")
def test_the_trainers_gradient_is_that_of_the_bare_model_however_the_minibatch_is_cut(shared, bare, loss):
    whole = spread(batch(12))
    tokens = bare_tokens(bare, whole)
    bare.zero_grad()
    expected, counts = loss(tokens, Totals(tokens=len(tokens.logprobs_M), sequences=12))
    expected.backward()
    grads = dict(bare.named_parameters())
    names = [name.removeprefix("model.") for name, _ in shared.scorer.named_parameters()]
    flat = torch.cat([grads[name].grad.flatten() for name in names])
    assert flat.abs().max() > 1e-4

    def cut(micro_batch_tokens, **ranks):
        options = {"minibatches": 1, "micro_batch_tokens": micro_batch_tokens, "ranks": 1, "seed": 0}
        (minibatch,) = plan(whole, **options | ranks)
        assert (minibatch.loss_tokens, minibatch.sequences) == (len(tokens.logprobs_M), 12)
        return minibatch

    first, second = (cut(100, ranks=2, rank=rank) for rank in (0, 1))
    assert len(first.micros) == len(second.micros) > 1
    both = dataclasses.replace(first, micros=(EMPTY, *second.micros, *first.micros, EMPTY))
    for minibatch in (cut(100_000), cut(1), both):
        result, found = gradient(shared, loss, minibatch)
        assert result["loss"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
        torch.testing.assert_close(found, flat, rtol=1e-3, atol=1e-6)
        for name, count in counts.items():
            assert result[name] == pytest.approx(float(count), rel=1e-5), name


def first_turn_at_once(whole):
    """The batch in which all trajectories but one are sampled from the first token after what they share."""
    starts_B = np.cumsum(whole.lengths_B) - whole.lengths_B
    sampled_N = whole.sampled_N.copy()
    for start in starts_B[1:]:
        sampled_N[start + 80 : start + 88] = True
    return dataclasses.replace(whole, sampled_N=sampled_N)


def test_the_gradient_is_the_same_where_the_common_beginning_is_computed_once(shared, bare):
    whole = first_turn_at_once(with_prefix(spread(batch(12)), list(range(1, 81))))
    tokens = bare_tokens(bare, whole)
    bare.zero_grad()
    expected, _ = LOSSES[0](tokens, Totals(tokens=len(tokens.logprobs_M), sequences=12))
    expected.backward()
    grads = dict(bare.named_parameters())
    names = [name.removeprefix("model.") for name, _ in shared.scorer.named_parameters()]
    flat = torch.cat([grads[name].grad.flatten() for name in names])

    for row_tokens in (100_000, 250, 1):
        (minibatch,) = plan(whole, minibatches=1, micro_batch_tokens=row_tokens, ranks=1, seed=0, share_prefix=True)
        assert all(micro.shared == 80 for micro in minibatch.micros)
        result, found = gradient(shared, LOSSES[0], minibatch)
        assert result["loss"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
        torch.testing.assert_close(found, flat, rtol=1e-3, atol=1e-6)


def test_the_place_of_a_token_is_the_same_where_the_common_beginning_is_computed_once():
    whole = first_turn_at_once(with_prefix(batch(5), list(range(1, 81))))

    def places(share_prefix):
        (minibatch,) = plan(whole, minibatches=1, micro_batch_tokens=10_000, ranks=1, seed=0, share_prefix=share_prefix)
        [micro] = minibatch.micros
        logprobs_M = torch.from_numpy(micro.old_logprobs_M)
        return [TokenPlace.of(0, micro, logprobs_M, at) for at in range(len(micro.targets_M))]

    assert places(share_prefix=True) == places(share_prefix=False)


@pytest.mark.parametrize("name", ["tokens", "kl", "square"])
def test_a_loss_may_not_count_under_a_name_of_the_learners(shared, name):
    (minibatch,) = plan(batch(3), minibatches=1, micro_batch_tokens=2048, ranks=1, seed=0)
    with pytest.raises(ValueError, match=f"'{name}'"):
        gradient(shared, lambda tokens, totals: (tokens.logprobs_M.sum(), {name: tokens.logprobs_M.sum()}), minibatch)
    assert gradient(shared, LOSSES[0], minibatch)[0]["tokens"] == minibatch.loss_tokens


def test_groups_of_one_and_equal_rewards_have_no_gradient(shared):
    flat = Batch(step=0, **(batch(3).arrays() | {"advantages_B": np.zeros(3, np.float32)}))
    (minibatch,) = plan(flat, minibatches=1, micro_batch_tokens=2048, ranks=1, seed=0)
    for loss in LOSSES[:1] + LOSSES[3:7]:
        result, found = gradient(shared, loss, minibatch)
        assert (result["loss"], result["grad_norm"]) == (0.0, 0.0)
        assert not found.any()


def test_what_stands_where_nothing_was_sampled_changes_nothing(shared):
    results = []
    for poison in (0.0, np.nan):
        whole = batch(6)
        logprobs_N = np.where(whole.sampled_N, whole.logprobs_N, poison).astype(np.float32)
        whole = Batch(step=0, **(whole.arrays() | {"logprobs_N": logprobs_N}))
        (minibatch,) = plan(whole, minibatches=1, micro_batch_tokens=100, ranks=1, seed=0)
        results.append(gradient(shared, LOSSES[1], minibatch))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Watching:
    """Keeps what it saw: (learner, proximal, which tokens)."""

    proximal: bool = True
    seen: ClassVar[list] = []

    def __call__(self, tokens, totals):
        self.seen.append((tokens.logprobs_M.detach(), tokens.proximal_logprobs_M, tokens.old_logprobs_M))
        return -tokens.logprobs_M.sum() / totals.tokens, {}


def test_the_proximal_policy_is_the_learner_before_the_steps_first_update(trainer):
    subject = trainer(loss=Watching(), minibatches=2, lr=1e-2, warmup_steps=0, micro_batch_tokens=100)
    whole = spread(batch(12))
    before_N = subject.score(whole)
    assert not before_N[~whole.sampled_N].any()
    of = dict(zip(whole.logprobs_N[whole.sampled_N].tolist(), before_N[whole.sampled_N].tolist(), strict=True))
    Watching.seen.clear()
    subject.train(whole)
    moved = 0.0
    for learner_M, proximal_M, old_M in Watching.seen:
        assert proximal_M.tolist() == pytest.approx([of[old] for old in old_M.tolist()], abs=1e-6)
        assert not proximal_M.requires_grad
        moved = max(moved, (learner_M - proximal_M).abs().max().item())
    assert len(Watching.seen) > 2
    assert moved > 1e-2  # the second minibatch came after an update


@pytest.mark.parametrize("prefix", [[], list(range(1, 81))], ids=["alone", "with a common beginning"])
def test_scores_are_those_of_the_bare_model(shared, bare, prefix):
    whole = with_prefix(batch(9), prefix)
    with torch.no_grad():
        expected_M = bare_tokens(bare, whole).logprobs_M
    np.testing.assert_allclose(shared.score(whole)[whole.sampled_N], expected_M.numpy(), atol=1e-5)


def sampled_by(subject, whole, version, wrong=None, by=0.0):
    """The batch as weights `version` would have sampled it; one token (index on N) is off by `by`."""
    logprobs_N, versions_N = subject.score(whole), np.where(whole.sampled_N, version, -1).astype(np.int32)
    if wrong is not None:
        logprobs_N[wrong] += by
    return Batch(step=whole.step, **(whole.arrays() | {"logprobs_N": logprobs_N, "versions_N": versions_N}))


def test_a_mismatch_on_fresh_tokens_ends_the_learner_with_numbers_and_place(trainer):
    subject, learner = trainer(mismatch_tolerance=1e-3, micro_batch_tokens=100, minibatches=1), Learner()
    learner.trainer = subject
    whole = batch(8)
    good = sampled_by(subject, whole, version=3)
    second = int(whole.lengths_B[:5].sum()) + 12  # of trajectory 5, the second turn begins at 10
    assert whole.sampled_N[second]
    bad = sampled_by(subject, whole, version=3, wrong=second, by=0.25)
    before = weights(subject)
    with pytest.raises(Fatal) as caught:
        learner.train(messages.Train(step=7, version=4), bad.arrays())
    words = str(caught.value)
    place = r"trajectory 5 of the batch, position 12 \(turn [2-9]\)"
    numbers = rf"learner says {good.logprobs_N[second]:.6f}, the sampler {bad.logprobs_N[second]:.6f}"
    said = "step 7", "version 3", "2.50e-01", "tolerance 1e-03", "mismatch_tolerance", numbers, "before it: 0"
    for part in said:
        assert part in words
    assert torch.equal(weights(subject), before)
    with pytest.raises(Mismatched, match=place):
        subject.train(bad, version=4)
    subject.optimizer.zero_grad()
    stale = subject.train(bad, version=5)  # one version old: what differs is staleness
    assert (stale["mismatch_fresh_max"], stale["staleness_mean"], stale["staleness_max"]) == (0.0, 1.0, 1.0)
    assert stale["mismatch_checked"] == 0
    assert stale["mismatch_max"] == pytest.approx(0.25, abs=1e-4)


def test_within_the_tolerance_or_without_one_the_step_is_trained(trainer):
    subject = trainer(minibatches=2)
    metrics = subject.train(sampled_by(subject, batch(8), version=0), version=1)
    assert metrics["mismatch_fresh_max"] < 1e-5
    assert 0.3 < metrics["mismatch_checked"] < 0.7, "the first minibatch"
    assert metrics["staleness_max"] == 0
    subject = trainer(minibatches=1, mismatch_tolerance=None)
    metrics = subject.train(sampled_by(subject, batch(8), 0, wrong=5, by=0.25), version=1)
    assert metrics["mismatch_fresh_max"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["mismatch_checked"] == 1


@pytest.mark.parametrize("broken", ["sampler", "advantage", "loss"])
def test_what_is_not_finite_is_named_by_minibatch_microbatch_and_token(trainer, broken):
    subject = trainer(micro_batch_tokens=60, minibatches=2)
    whole = batch(8)
    arrays = {name: array.copy() for name, array in whole.arrays().items()}
    index = int(whole.lengths_B[:6].sum()) + 5
    if broken == "sampler":
        arrays["logprobs_N"][index] = np.nan
    else:
        arrays["advantages_B"][6] = np.inf if broken == "advantage" else 3e38
        arrays["logprobs_N"][index] = -50.0 if broken == "loss" else arrays["logprobs_N"][index]
    before = weights(subject)
    with pytest.raises(Diverged) as caught:
        subject.train(Batch(step=0, **arrays), version=1)
    words = str(caught.value)
    token = ", trajectory 6 of the batch, position " if broken != "loss" else "; updates"
    for part in (r"minibatch \d of 2: not finite", r"first in microbatch \d of \d on rank 0" + token):
        assert re.search(part, words), words
    if broken == "sampler":
        assert "position 5 (turn 1)" in words
        assert "the sampler nan" in words
    first_minibatch = "minibatch 1 of 2" in words
    assert torch.equal(weights(subject), before) == first_minibatch


@pytest.mark.parametrize("minibatch", [1, 2])
def test_what_is_not_finite_says_how_many_updates_the_step_has_made(trainer, minibatch):
    subject, whole = trainer(minibatches=2), batch(8)
    advantages_B = whole.advantages_B.copy()
    advantages_B[subject.plan(whole, 2)[minibatch - 1].micros[0].trajectories_S[0]] = np.inf
    before = weights(subject)
    words = rf"^minibatch {minibatch} of 2: not finite: .*; updates of this step before it: {minibatch - 1}$"
    with pytest.raises(Diverged, match=words):
        subject.train(Batch(step=0, **(whole.arrays() | {"advantages_B": advantages_B})))
    assert torch.equal(weights(subject), before) == (minibatch == 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cliff:
    """0 everywhere, and no slope there."""

    def __call__(self, tokens, totals):
        return (0 * tokens.logprobs_M).sqrt().sum(), {}


def test_a_gradient_that_is_not_finite_below_a_finite_loss_says_so(trainer):
    subject = trainer(loss=Cliff())
    before = weights(subject)
    with pytest.raises(Diverged, match=r"minibatch 1 of 2.*grad_norm nan"):
        subject.train(batch(4))
    assert torch.equal(weights(subject), before)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("micro_batch_tokens", [50, 4096])
def test_a_teachers_likeliest_tokens_reach_the_loss_with_their_gradient(shared, bare, direction, micro_batch_tokens):
    """And so do advantages of tokens, which are added to those of their trajectory."""
    plain, rng = spread(batch(6)), np.random.default_rng(1)
    tokens = len(plain.token_ids_N)
    ids_NK = np.argsort(rng.random((tokens, 512)), 1)[:, :4].astype(np.int32)
    teacher_NK = rng.dirichlet(np.ones(5), tokens)[:, :4]
    taught = {
        "token_advantages_N": rng.normal(size=tokens).astype(np.float32),
        "teacher_ids_NK": ids_NK,
        "teacher_logprobs_NK": np.log(teacher_NK).astype(np.float32),
    }
    whole = Batch(step=0, **(plain.arrays() | taught))
    loss = TopK(direction=direction, coef=0.5)
    seen = bare_tokens(bare, whole)
    ends_B, added, top = np.cumsum(whole.lengths_B), [], []
    for end, length in zip(ends_B, whole.lengths_B, strict=True):
        at = slice(end - length + 1, end)
        mask = whole.sampled_N[at]
        ids = torch.from_numpy(whole.token_ids_N[end - length : end]).long()
        logprobs = bare(ids[None]).logits[0, :-1].log_softmax(-1)[torch.from_numpy(mask)]
        top.append(logprobs.gather(-1, torch.from_numpy(ids_NK[at][mask]).long()))
        added.append(torch.from_numpy(taught["token_advantages_N"][at][mask]))
    mask_N = np.concatenate(
        [np.r_[False, whole.sampled_N[e - n + 1 : e]] for e, n in zip(ends_B, whole.lengths_B, strict=True)]
    )
    seen = seen._replace(
        advantages_M=seen.advantages_M + torch.cat(added),
        top_logprobs_MK=torch.cat(top),
        teacher_logprobs_MK=torch.from_numpy(taught["teacher_logprobs_NK"][mask_N]),
    )
    wanted, counts = loss(seen, Totals(len(seen.logprobs_M), seen.sequences))
    bare.zero_grad()
    wanted.backward()
    (minibatch,) = plan(whole, minibatches=1, micro_batch_tokens=micro_batch_tokens, ranks=1, seed=0)
    result, _ = gradient(shared, loss, minibatch)
    norm = torch.stack([it.grad.norm() for it in bare.parameters() if it.grad is not None]).norm()
    assert result["loss"] == pytest.approx(wanted.item(), rel=1e-4)
    assert result["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    assert result["teacher_kl"] == pytest.approx(counts["teacher_kl"].item(), rel=1e-4)
