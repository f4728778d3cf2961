"""Precision, checkpointing, adapters, kinds of attention: what they change of the update, on one rank and on two."""

import dataclasses
import json
import subprocess

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

import algo.learner.model.scorer
from algo.learner.config import LearnerConfig
from algo.learner.measure.flops import cost_of
from algo.learner.model.attention import activate
from algo.learner.model.lora import add_adapters
from algo.learner.model.unsharded import UnshardedScorer
from algo.learner.pack import plan
from algo.learner.state.publish import full_state
from tests.support.algo_fakes import batch, write_checkpoint
from tests.support.algo_gradients import CASES, build, gradient, gradients
from tests.support.algo_node import on_ranks
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def two_ranks(checkpoint, tmp_path_factory):
    """Started before this process has its own group; they run side by side."""
    result = tmp_path_factory.mktemp("two") / "gradients.pt"
    command = on_ranks(2, "tests.support.algo_gradients", checkpoint, result)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        yield lambda: process.wait(300) == 0 and torch.load(result)
        process.kill()


@pytest.fixture(scope="module")
def group(two_ranks, tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def one_rank_and_weights(group, checkpoint, tmp_path_factory):
    return gradients(checkpoint, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def one_rank(one_rank_and_weights):
    return one_rank_and_weights[0]


@pytest.fixture
def trainer(group, checkpoint, tmp_path):
    return lambda **fields: build(checkpoint, tmp_path, **fields)


def minibatch(trajectories=8, tokens=2048):
    return plan(batch(trajectories), minibatches=1, micro_batch_tokens=tokens, ranks=1, seed=0)[0]


def assert_close(actual, expected, rtol=1e-4, atol=1e-7):
    assert actual[0] == pytest.approx(expected[0], rel=1e-5)
    assert actual[1] == pytest.approx(expected[1], rel=rtol)
    assert actual[2].keys() == expected[2].keys()
    for name, tensor in expected[2].items():
        torch.testing.assert_close(actual[2][name], tensor, rtol=rtol, atol=atol)


KEPT = ("all but the MLP kept", "products kept")


@pytest.mark.parametrize("case", ["small rows", "other order", "dense mask", "checkpointing", *KEPT, "offload"])
def test_the_gradient_is_that_of_plain_fp32_over_one_row(one_rank, case):
    assert_close(one_rank[case], one_rank["plain"])


@pytest.mark.parametrize("case", ["adapters, small rows", "adapters, products kept"])
def test_adapters_get_the_same_gradient_in_any_cut_and_nothing_else_gets_one(one_rank, case):
    assert_close(one_rank[case], one_rank["adapters"])
    assert all(".lora_" in name and tensor.abs().max() > 0 for name, tensor in one_rank["adapters"][2].items())


def test_the_divergence_from_the_reference_is_part_of_the_gradient(one_rank):
    for case, without in (("reference", "plain"), ("adapters, reference", "adapters")):
        assert abs(one_rank[case][1] - one_rank[without][1]) > 0.01 * one_rank[without][1]


def test_bfloat16_points_where_fp32_does(one_rank):
    loss, norm, tensors = one_rank["bfloat16"]
    expected_loss, expected_norm, expected = one_rank["plain"]
    assert loss == pytest.approx(expected_loss, rel=0.02)
    assert norm == pytest.approx(expected_norm, rel=0.02)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    for name, tensor in tensors.items():
        assert torch.cosine_similarity(tensor.flatten(), expected[name].flatten(), 0) > 0.99


def test_two_ranks_have_the_gradients_and_the_merged_weights_of_one(one_rank_and_weights, two_ranks):
    one_rank, weights = one_rank_and_weights
    actual, gathered = two_ranks()
    assert gathered.keys() == weights.keys()
    assert all(torch.equal(gathered[name], tensor) for name, tensor in weights.items())
    assert actual.keys() == CASES.keys()
    for case in CASES.keys() - {"bfloat16"}:
        assert_close(actual[case], one_rank[case])
    assert actual["bfloat16"][1] == pytest.approx(one_rank["bfloat16"][1], rel=0.02)


def test_bfloat16_keeps_fp32_masters_that_an_update_changes(trainer, checkpoint):
    subject = trainer(dtype="bfloat16", lr=1e-6)
    before = {name: tensor.clone() for name, tensor in full_state(subject.scorer).items()}
    canary = subject.score_canary()
    subject.train(batch(8))
    after = full_state(subject.scorer)
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert canary.dtype == subject.score_canary().dtype == "float32"
    assert {name for name in before if torch.equal(before[name].bfloat16(), after[name].bfloat16())} != set()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(after[name], tensor) for name, tensor in full_state(subject.scorer).items())


def test_adapters_alone_are_trained_and_leave_merged(trainer, tmp_path):
    from transformers import AutoModelForCausalLM

    subject, full = trainer(lora_rank=2), trainer()
    names = {name: parameter.clone() for name, parameter in subject.scorer.named_parameters()}
    subject.train(batch(8))
    changed = {name for name, weight in subject.scorer.named_parameters() if not torch.equal(weight, names[name])}
    assert changed == {name for name in names if ".lora_" in name}
    moments = [sum(state["exp_avg"].numel() for state in subject.optimizer.state.values())]
    full.train(batch(8))
    moments.append(sum(state["exp_avg"].numel() for state in full.optimizer.state.values()))
    assert moments[0] < 0.15 * moments[1]
    state = full_state(subject.scorer)
    assert state.keys() == full_state(full.scorer).keys()
    subject.save(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    model.load_state_dict(state, strict=False)  # the file is in the checkpoint's bf16
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    torch.testing.assert_close(torch.from_numpy(subject.score_canary()), logprobs.detach(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "model.embed_tokens"])
def test_an_adapter_that_cannot_leave_with_the_tied_embeddings_is_refused(trainer, target):
    """The head is not among the weights that leave; replicas and checkpoints would go without its adapter."""
    with pytest.raises(ValueError, match=rf"LearnerConfig.lora_targets must not .*got \('q_proj', '{target}'\)"):
        trainer(lora_rank=2, lora_targets=("q_proj", target))


def test_a_name_of_no_layer_is_refused_beside_one_that_fits(trainer):
    """peft would train the others, and say nothing."""
    with pytest.raises(ValueError, match=r"LearnerConfig.lora_targets must not hold 'v_porj', .*got"):
        trainer(lora_rank=2, lora_targets=("q_proj", "v_porj"))


def test_a_checkpoint_without_a_weight_is_refused(group, tmp_path):
    """The library would make random numbers of it. The name that a wrapped model has for it is as good as none."""
    source = write_checkpoint(tmp_path / "tiny")
    state = load_file(source / "model.safetensors")
    state["module.norm.weight"] = state.pop("model.norm.weight")
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"holds no weight model\.norm\.weight"):
        build(source, tmp_path)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_a_model_with_dropout_drops_nothing(group, tmp_path, checkpointing):
    """The sampler has none: log-probabilities would differ by chance, and the canary with them."""
    source, actual, calls = write_checkpoint(tmp_path / "tiny"), [], []
    fields = json.loads((source / "config.json").read_text())
    for dropout in (0.0, 0.5):
        (source / "config.json").write_text(json.dumps(fields | {"attention_dropout": dropout}))
        subject = build(source, tmp_path, attention="sdpa", activation_checkpointing=checkpointing)
        actual.append((gradient(subject, minibatch()), subject.score_canary()))
    assert_close(actual[1][0], actual[0][0])
    assert np.array_equal(actual[1][1], actual[0][1])
    subject.scorer.model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    gradient(subject, minibatch())
    assert len(calls) == 1 + (checkpointing != "none")


@pytest.mark.parametrize("config", [{}, {"lora_rank": 2}, {"activation_checkpointing": "full"}])
def test_the_canary_of_one_rank_takes_no_copy_of_the_weights_and_is_that_of_the_sharded_model(trainer, config):
    subject = trainer(**config)
    before = subject.score_canary()
    subject.train(batch(8))
    whole = subject.score_canary()
    assert isinstance(subject.canary.scorer, UnshardedScorer)
    assert all(isinstance(weight, DTensor) for weight in subject.scorer.parameters()), "none was gathered"
    subject.canary.scorer = subject.scorer
    assert np.array_equal(whole, subject.score_canary())
    assert not np.array_equal(whole, before)


def test_the_canary_computes_in_the_dtype_of_the_passes(trainer):
    subject = trainer(dtype="bfloat16")
    assert subject.canary.scorer is subject.scorer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_and_entropies_are_those_of_log_softmax(dtype):
    generator = torch.Generator().manual_seed(0)
    values_MV = (4 * torch.randn(6, 50, generator=generator)).to(dtype)
    targets_M, weights_M = torch.arange(6), torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, -1.0])
    ours_MV, plain_MV = (values_MV.clone().requires_grad_() for _ in range(2))
    logprobs_M, entropy_M = algo.learner.model.scorer.LogProb.apply(ours_MV, targets_M)
    expected_MV = plain_MV.float().log_softmax(-1)
    torch.testing.assert_close(logprobs_M, expected_MV[targets_M, targets_M])
    torch.testing.assert_close(entropy_M, torch.distributions.Categorical(logits=expected_MV).entropy())
    (logprobs_M * weights_M).sum().backward()
    (expected_MV[targets_M, targets_M] * weights_M).sum().backward()
    torch.testing.assert_close(ours_MV.grad, plain_MV.grad)
    assert ours_MV.grad.dtype == dtype


def head_errors(subject, minibatch):
    """|log p - that of float64 on the same hidden states and weights| of each target of a minibatch."""
    kept, errors = [], []
    model = subject.scorer.model
    handle = model.base_model.register_forward_hook(lambda *parts: kept.append(parts[-1].last_hidden_state[0]))
    weight_VH = full_state(subject.scorer)["model.embed_tokens.weight"].bfloat16().double()
    for micro in minibatch.micros:
        (logprobs_M,) = subject.logprobs([micro])
        logits_MV = kept.pop()[torch.from_numpy(micro.positions_M)].double() @ weight_VH.T
        targets_M = torch.from_numpy(micro.targets_M)
        errors.append(logprobs_M - logits_MV.log_softmax(-1).gather(-1, targets_M[:, None]).squeeze(-1))
    handle.remove()
    return torch.cat(errors).abs()


@pytest.mark.parametrize("rows", [algo.learner.model.scorer.LOGIT_ROWS, 7])
def test_a_head_in_fp32_gives_log_probabilities_without_the_rounding_of_bfloat16(group, tmp_path, monkeypatch, rows):
    """The final norm is scaled so that logits spread as a trained model's do."""
    source, errors = write_checkpoint(tmp_path / "tiny"), {}
    state = load_file(source / "model.safetensors")
    state["model.norm.weight"] *= 12
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(algo.learner.model.scorer, "LOGIT_ROWS", rows)
    for fp32_head in (False, True):
        subject = build(source, tmp_path, dtype="bfloat16", fp32_head=fp32_head)
        errors[fp32_head] = head_errors(subject, minibatch())
    assert errors[False].mean() > 1e-3
    assert errors[True].max() < errors[False].max() / 100
    assert errors[True].mean() < errors[False].mean() / 100


@pytest.mark.parametrize("fields", [{}, {"lora_rank": 2}])
def test_a_head_in_fp32_has_the_gradient_of_fp32_to_rounding_in_chunks_too(trainer, monkeypatch, fields):
    """0.95: the passes below the head round as before; of this minibatch one gradient has a cosine of 0.98."""
    subject = trainer(dtype="bfloat16", fp32_head=True, **fields)
    kept = gradient(subject, minibatch())
    exact = gradient(trainer(**fields), minibatch())
    assert kept[0] == pytest.approx(exact[0], rel=0.02)
    for name, tensor in kept[2].items():
        assert torch.cosine_similarity(tensor.flatten(), exact[2][name].flatten(), 0) > 0.95
    monkeypatch.setattr(algo.learner.model.scorer, "KEPT_LOGITS", 0)
    monkeypatch.setattr(algo.learner.model.scorer, "LOGIT_ROWS", 7)
    with Widest() as widest:
        assert_close(gradient(subject, minibatch()), kept, rtol=1e-2, atol=1e-5)
    assert widest.rows == 64  # the weight of the head, transposed


def test_a_likely_tokens_log_probability_is_right_to_rounding():
    logits_MV = 30 + 8 * torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    expected_M, targets_M = logits_MV.double().log_softmax(-1).max(-1)
    logprobs_M, _ = algo.learner.model.scorer.LogProb.apply(logits_MV, targets_M)
    torch.testing.assert_close(logprobs_M.double(), expected_M, rtol=0, atol=1e-6)


class Widest(TorchDispatchMode):
    """The most rows of fp32 logits that any operation makes."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.ndim == 2 and result.shape[1] == 512:
            self.rows = max(self.rows, result.shape[0])
        return result


def test_a_large_vocabulary_is_scored_in_recomputed_chunks_with_the_same_gradient(trainer, monkeypatch):
    subject, whole = trainer(), minibatch()
    with Widest() as widest:
        kept = gradient(subject, whole)
    assert widest.rows >= whole.loss_tokens
    monkeypatch.setattr(algo.learner.model.scorer, "KEPT_LOGITS", 0)
    monkeypatch.setattr(algo.learner.model.scorer, "LOGIT_ROWS", 7)
    with Widest() as widest:
        recomputed = gradient(subject, whole)
    assert widest.rows == 64  # the weight of the head, transposed
    assert_close(recomputed, kept)


@pytest.mark.parametrize("offload", [False, True])
def test_offload_takes_the_inputs_of_all_layers_out_of_autograds_hands(trainer, offload):
    """Of two hooks around what is kept for the backward pass the inner one gets it: the offload, where it is on."""
    subject, [micro] = trainer(activation_checkpointing="full", activation_offload=offload), minibatch().micros
    width, layers = subject.scorer.model.config.hidden_size, subject.scorer.model.config.num_hidden_layers
    seen = []

    def keep(tensor):
        seen.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        subject.forward(micro)
    inputs = seen.count((1, micro.token_ids_RL.size, width))
    assert inputs == 0 if offload else inputs >= layers


@pytest.mark.parametrize("case", KEPT)
def test_what_is_kept_changes_no_gradient_on_one_rank_or_two(one_rank, two_ranks, case):
    for actual in (one_rank, two_ranks()[0]):
        for name, gradient_of_all in actual["checkpointing"][2].items():
            torch.testing.assert_close(actual[case][2][name], gradient_of_all, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_each_kind_of_checkpointing_computes_again_what_it_does_not_keep(trainer, lora_rank):
    executed = {}
    for kind in ("none", "selective", "attention", "full"):
        subject = trainer(activation_checkpointing=kind, lora_rank=lora_rank)
        with FlopCounterMode(display=False) as counter:
            subject.update(minibatch())
        executed[kind] = counter.get_total_flops()
        config = subject.scorer.model.config
    wide = config.hidden_size * config.intermediate_size * config.num_hidden_layers
    tokens = sum(minibatch().lengths)
    again = {kind: count - executed["none"] for kind, count in executed.items()}
    adapters = again["selective"]
    trained = sum(parameter.numel() for parameter in subject.trained) if lora_rank else 0
    if lora_rank:  # and the gradient of the first layer's input
        assert 0.9 * trained < adapters / (2 * tokens) < trained + wide, "no product of the layer's own"
    else:
        assert adapters == 0
    assert again["attention"] - adapters == 2 * 2 * wide * tokens, "the MLP's two wide products"
    assert again["full"] > again["attention"] + 2 * config.hidden_size * config.hidden_size * tokens


def test_kernels_that_are_not_there_are_named(trainer):
    with pytest.raises(ValueError, match=r"LearnerConfig\.flash_attention .*'FA3'.*'cpu'.*Fix: "):
        trainer(flash_attention="FA3")
    with pytest.raises(ValueError, match=r"flash_attn_interface.*Fix: "):
        activate("FA3", "cuda")


def test_cost_counts_what_the_linear_layers_do(trainer):
    whole = minibatch()
    for fields, share in (({}, 1.0), ({"lora_rank": 2}, 0.93)):
        subject = trainer(**fields)
        with FlopCounterMode(display=False) as counter:
            subject.update(whole)
        counted = sum(
            flops
            for name, flops in counter.get_flop_counts()["Global"].items()
            if str(name).endswith((".mm", ".addmm"))
        )
        linear = dataclasses.replace(subject.cost, square=0.0)
        needed = linear.of(targets=whole.loss_tokens, lengths=whole.lengths)
        assert share * needed <= counted <= needed
    assert subject.cost.square == 6 * 2 * 4 * 16


def test_an_adapter_on_the_head_costs_at_targets_only_as_the_head_does():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=32, num_hidden_layers=1, head_dim=8, tie_word_embeddings=False, **sizes)
    costs = []
    for head in ((), ("lm_head",)):
        with torch.device("meta"):
            model = Qwen3ForCausalLM(config)
        add_adapters(model, LearnerConfig(lora_rank=2, lora_targets=("q_proj", *head)))
        costs.append(cost_of(model))
    assert costs[1] == dataclasses.replace(costs[0], target=4 * 16 * 32 + 6 * 2 * (16 + 32))


def test_speed_is_reported_and_mfu_where_the_peak_is_known(trainer):
    for fields in ({}, {"peak_flops": 1e12}):
        metrics = trainer(**fields).train(batch(8))
        assert metrics["tokens_per_s"] > metrics["tokens"] / metrics["train_s"]
        assert metrics["padding_waste"] == 0.0
        assert ("mfu" in metrics) == bool(fields)
    assert 0 < metrics["mfu"] < 1


def test_where_no_gpu_is_the_device_is_refused(trainer):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(ValueError, match=r"LearnerConfig.device must be 'cpu' for rank 0 .* 0 GPUs, got 'cuda'"):
        trainer(device="cuda", dtype="bfloat16")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda"}, "dtype"),
        ({"lora_rank": -1}, "lora_rank"),
        ({"lora_alpha": 0.0}, "lora_alpha"),
        ({"lora_targets": ()}, "lora_targets"),
        ({"peak_flops": 0.0}, "peak_flops"),
        ({"activation_offload": True}, "activation_checkpointing"),
        ({"context_parallel": 0}, "context_parallel"),
        ({"context_parallel": 2, "attention": "sdpa"}, "attention"),
    ],
)
def test_config_names_the_wrong_field(fields, named):
    with pytest.raises(ValueError, match=rf"LearnerConfig\.{named} must be"):
        LearnerConfig(**fields)
