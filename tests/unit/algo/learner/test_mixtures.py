"""Mixtures of experts on one rank against transformers' own passes, and what is refused. Two ranks: tests/real."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from algo.learner.model.experts import mixture_of
from algo.learner.model.unsharded import UnshardedScorer
from algo.learner.pack import EMPTY, plan
from tests.support import algo_mixtures as mixtures
from tests.support.algo_fakes import batch, write_checkpoint
from tests.support.algo_gradients import build, gradient

ROUTER = "mlp.gate.weight"
ROUTERS = (ROUTER, "mlp.router.weight", "mlp.router.bias")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    return {family: mixtures.write(folder, family) for family in ("Qwen3Moe", "GptOss")}


@pytest.fixture(scope="module")
def source(sources):
    return sources["Qwen3Moe"]


@pytest.mark.parametrize("sizes", ["as written", "held out"])
@pytest.mark.parametrize("family", mixtures.FAMILIES)
def test_five_steps_give_the_losses_gradients_and_weights_of_transformers(tmp_path, family, sizes):
    fields = mixtures.HELD_OUT[family] if sizes == "held out" else {}
    checkpoint = mixtures.write(tmp_path, family, **fields)
    mixtures.assert_equal(mixtures.by_the_learner(checkpoint, tmp_path), mixtures.by_transformers(checkpoint))


@pytest.mark.parametrize(
    ("family", "case"),
    [
        *(("Qwen3Moe", case) for case in mixtures.CASES),
        *(("GptOss", case) for case in ("frozen router", "products kept", "balanced, small rows, checkpointing")),
    ],
)
def test_no_option_changes_what_five_steps_give(tmp_path, sources, family, case):
    fields = mixtures.CASES[case]
    frozen = ROUTERS if case == "frozen router" else ()
    expected = mixtures.by_transformers(sources[family], coef=fields.get("load_balancing_coef", 0.0), frozen=frozen)
    mixtures.assert_equal(mixtures.by_the_learner(sources[family], tmp_path, **fields), expected)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("Glm4Moe", "selective"),
        ("Glm4Moe", "attention"),
        ("Glm4Moe", "full"),
        ("Qwen2Moe", "attention"),
        ("DeepseekV3", "selective"),
    ],
)
def test_what_comes_after_a_layers_router_is_computed_again_as_it_was(tmp_path, family, kind):
    """Shared experts: no product of the measured load is among those that a layer keeps."""
    checkpoint = mixtures.write(tmp_path, family)
    found = mixtures.by_the_learner(checkpoint, tmp_path, activation_checkpointing=kind)
    mixtures.assert_equal(found, mixtures.by_transformers(checkpoint))


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_a_shared_beginning_counts_for_each_trajectory(tmp_path, sources, family):
    fields = {"load_balancing_coef": 0.5, "micro_batch_tokens": 200}
    found = mixtures.by_the_learner(sources[family], tmp_path, prefix=True, **fields)
    mixtures.assert_equal(found, mixtures.by_transformers(sources[family], coef=0.5, prefix=True))


def test_a_frozen_router_stays_as_the_checkpoint_has_it_bit_by_bit(tmp_path, source):
    weights = mixtures.by_the_learner(source, tmp_path, train_router=False, load_balancing_coef=0.5)[3]
    before = dict(mixtures.plain(source).named_parameters())
    routers = [name for name in before if name.endswith(ROUTER)]
    assert len(routers) == 3
    assert all(torch.equal(weights[name], before[name]) for name in routers)
    assert not torch.equal(
        weights["model.layers.0.mlp.experts.down_proj"], before[routers[0].replace("gate.weight", "experts.down_proj")]
    )


def test_experts_that_get_no_token_have_a_gradient_of_zero(tmp_path):
    checkpoint = mixtures.lopsided(tmp_path)
    found = mixtures.by_the_learner(checkpoint, tmp_path)
    mixtures.assert_equal(found, mixtures.by_transformers(checkpoint))
    for part in ("gate_up_proj", "down_proj"):
        gradient = found[2][f"model.layers.1.mlp.experts.{part}"]
        assert gradient[0].abs().max() > 0
        assert (gradient[1:] == 0).all()


def test_the_load_of_the_experts_is_measured(tmp_path):
    subject = build(mixtures.lopsided(tmp_path), tmp_path, micro_batch_tokens=60)
    metrics = subject.train(batch(9))
    assert metrics["expert_share_max"] == 1.0
    assert metrics["experts_unused"] == 7 * 2  # of 8 experts in two of three layers
    dense = build(write_checkpoint(tmp_path / "dense"), tmp_path).train(batch(9))
    assert not {"load_balancing", "expert_share_max", "experts_unused"} & dense.keys()


def test_routers_that_score_by_a_sigmoid_count_with_their_scores_divided_by_the_sum(tmp_path):
    checkpoint, whole = mixtures.write(tmp_path, "Glm4Moe"), batch(9)
    found = build(checkpoint, tmp_path, minibatches=1).train(whole)["load_balancing"]
    model, outputs, ends = mixtures.plain(checkpoint), [], np.cumsum(whole.lengths_B)
    for layer in mixture_of(model):
        layer.router.register_forward_hook(lambda _router, _inputs, output: outputs.append(output))
    with torch.no_grad():
        for end, length in zip(ends, whole.lengths_B, strict=True):
            inputs = np.flatnonzero(whole.sampled_N[end - length : end])[-1]
            model(torch.from_numpy(whole.token_ids_N[end - length : end - length + inputs]).long()[None])
    scores = torch.cat([logits.sigmoid() for logits, _, _ in outputs])
    chosen = torch.nn.functional.one_hot(torch.cat([experts for _, _, experts in outputs]), 8).sum(1).float()
    expected = 8 * (chosen.mean(0) * (scores / scores.sum(1, keepdim=True)).mean(0)).sum()
    assert found == pytest.approx(expected.item(), rel=1e-6)


def test_filler_does_not_count(tmp_path, source):
    [minibatch] = plan(batch(5), minibatches=1, micro_batch_tokens=60, ranks=1, seed=0)
    filled = dataclasses.replace(minibatch, micros=(EMPTY, *minibatch.micros, EMPTY))
    found = [build(source, tmp_path, load_balancing_coef=0.5).update(each) for each in (minibatch, filled)]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0]["load_balancing"] > 0


@pytest.mark.parametrize("coef", [0.0, 0.5])
def test_a_balanced_load_is_what_the_load_balancing_loss_leads_to(tmp_path, source, coef):
    subject = build(source, tmp_path, load_balancing_coef=coef, lr=1e-2, grad_clip=1.0, warmup_steps=0)
    steps = [subject.train(batch(16, step=0))["load_balancing"] for _ in range(12)]
    assert (steps[-1] < 2.05) is (coef > 0), steps


def test_the_mixture_of_each_layer_is_found(tmp_path):
    found = mixture_of(mixtures.plain(mixtures.write(tmp_path, "Glm4Moe", num_experts_per_tok=3)))
    assert [(layer.layer, layer.count, layer.per_token) for layer in found] == [(1, 8, 3), (2, 8, 3)]
    assert [layer.name for layer in found] == ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    assert found[0].by_sigmoid
    assert mixture_of(mixtures.plain(write_checkpoint(tmp_path / "dense"))) == []


class Products(TorchDispatchMode):
    """Counts the grouped products of experts."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.count += operator is torch.ops.aten._grouped_mm.default
        return operator(*arguments, **(options or {}))


@pytest.mark.parametrize(
    ("family", "kind", "again"),
    [
        ("Qwen3Moe", "none", 0),
        ("Qwen3Moe", "selective", 0),
        ("Qwen3Moe", "attention", 2),
        ("Qwen3Moe", "full", 2),
        ("GptOss", "selective", 2),
    ],
)
def test_the_products_of_experts_are_computed_again_as_the_kind_says(tmp_path, sources, family, kind, again):
    subject = build(sources[family], tmp_path, activation_checkpointing=kind)
    [minibatch] = plan(batch(5), minibatches=1, micro_batch_tokens=4096, ranks=1, seed=0)
    with Products() as products:
        subject.update(minibatch)
    assert products.count == 3 * (2 * 3 + again)  # in each of three layers two, each with two for its gradients


def test_bfloat16_passes_train_float32_weights(tmp_path, source):
    found = mixtures.by_the_learner(source, tmp_path, dtype="bfloat16", micro_batch_tokens=60)
    expected = mixtures.by_transformers(source)
    assert found[0][0] == pytest.approx(expected[0][0], abs=0.1)
    assert all(weight.dtype == torch.float32 for weight in found[3].values())
    assert found[0][-1] < found[0][0]


LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
DENSE = ("gate_proj", "up_proj", "down_proj")
ADAPTED = {  # layers that get adapters, by family, and how many adapters that are
    "Qwen3Moe": (ATTENTION, 3 * 4),
    "Mixtral": (ATTENTION, 3 * 4),
    "Qwen2Moe": ((*ATTENTION, *DENSE), 3 * 7),
    "Glm4Moe": ((*ATTENTION, *DENSE), 3 * 7),
    "DeepseekV3": ((*LATENT, *DENSE), 3 * 8),
    "GptOss": (ATTENTION, 3 * 4),
}


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_are_trained_and_nothing_else(tmp_path, family):
    targets, adapters = ADAPTED[family]
    subject = build(mixtures.write(tmp_path, family), tmp_path, lora_rank=4, lora_targets=targets)
    before = {name: mixtures.whole_of(weight) for name, weight in subject.scorer.named_parameters()}
    assert np.isfinite(subject.train(batch(9))["loss"])
    after = dict(subject.scorer.named_parameters())
    changed = {name for name in before if not torch.equal(mixtures.whole_of(after[name]), before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    assert len(changed) == 2 * adapters
    assert not any(".experts." in name for name in changed)


@pytest.mark.parametrize("target", ["gate_proj", "experts", "gate_up_proj", "gate"])
def test_experts_and_routers_get_no_adapters(tmp_path, source, target):
    with pytest.raises(ValueError, match=rf"lora_targets must not hold '{target}', since experts.*q_proj"):
        build(source, tmp_path, lora_rank=4, lora_targets=("q_proj", target))


@pytest.mark.parametrize("fields", [{"train_router": False}, {"load_balancing_coef": 0.1}], ids=str)
def test_a_dense_model_takes_no_option_of_mixtures(tmp_path, fields):
    with pytest.raises(ValueError, match=rf"LearnerConfig\.{next(iter(fields))} must be .* for a dense model"):
        build(write_checkpoint(tmp_path / "dense"), tmp_path, **fields)


REFUSED = {
    "GraniteMoe": ({"num_local_experts": 4}, "router beside .* does not return its logits"),
    "JetMoe": ({"num_local_experts": 4, "kv_channels": 8}, "no router beside it"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_mixture_that_is_built_otherwise_is_refused_by_name(tmp_path, family):
    fields, words = REFUSED[family]
    checkpoint = mixtures.write(tmp_path, family, num_experts_per_tok=2, **fields)
    with pytest.raises(ValueError, match=words):
        build(checkpoint, tmp_path)


def test_gpt_oss_is_refused_with_plain_attention(tmp_path):
    checkpoint = mixtures.write(tmp_path, "GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=8)
    with pytest.raises(ValueError, match=r"'gpt_oss' gives a trajectory in a row .* nats"):
        build(checkpoint, tmp_path, attention="eager")


def test_scores_and_the_canary_are_those_of_transformers(tmp_path, source):
    subject = build(source, tmp_path)
    assert isinstance(subject.canary.scorer, UnshardedScorer)
    whole = batch(9)
    with torch.no_grad():
        found, ends = subject.score(whole), np.cumsum(whole.lengths_B)
        model, canary = mixtures.plain(source), torch.tensor([1, 2, 3, 4, 5])
        for end, length in zip(ends, whole.lengths_B, strict=True):
            ids = torch.from_numpy(whole.token_ids_N[end - length : end]).long()
            own = logprobs_of(model, ids) * torch.from_numpy(whole.sampled_N[end - length + 1 : end])
            np.testing.assert_allclose(found[end - length + 1 : end], own, rtol=0, atol=1e-5)
        np.testing.assert_allclose(subject.score_canary()[:4], logprobs_of(model, canary), rtol=0, atol=1e-5)
        subject.canary.scorer, by_shards = subject.scorer, subject.score_canary()
    np.testing.assert_array_equal(subject.score_canary(), by_shards)


def logprobs_of(model, ids):
    return model(ids[None, :-1]).logits[0].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)


@pytest.mark.parametrize("adapters", [{}, {"lora_rank": 4, "lora_targets": ATTENTION}], ids=str)
def test_the_reference_is_a_mixture_too(tmp_path, source, adapters):
    from algo.learner.config import LearnerConfig
    from algo.learner.trainer import Trainer

    subject = Trainer(LearnerConfig(reference_kl_coef=0.1, minibatches=1, lr=1e-2, **adapters), source, [], tmp_path, 5)
    steps = [subject.train(batch(9))["reference_kl"] for _ in range(3)]
    assert steps[0] == pytest.approx(0, abs=1e-6)
    assert steps[-1] > 1e-6


def test_experts_that_share_a_token_add_to_its_gradient_in_the_same_order_each_time(tmp_path):
    """With three experts a token the order of the sum counts, and two threads race for it where nothing orders them."""
    checkpoint = mixtures.write(tmp_path, num_experts_per_tok=3, hidden_size=256)
    trainer = build(checkpoint, tmp_path, threads=2)
    (minibatch,) = plan(batch(64), minibatches=1, micro_batch_tokens=4096, ranks=1, rank=0, seed=0)
    first, *others = [gradient(trainer, minibatch)[2] for _ in range(4)]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
