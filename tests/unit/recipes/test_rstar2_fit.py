"""Memory arithmetic against what PyTorch and transformers really make; what fits; what is said where it does not."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from algo.learner.config import LearnerConfig
from algo.learner.model.attention import PACKED, bounds, register, window_of_mask
from algo.learner.model.lora import add_adapters
from algo.learner.model.sinks import GROUPED, RaggedKernel, with_sinks
from engine.console.options import parse
from recipes.rstar2 import rl, sft
from recipes.rstar2.fit import Config, command_of, fitting, main
from recipes.rstar2.parts.memory.learner import kept_activations, layer_activations, learner_moments
from recipes.rstar2.parts.memory.memory import (
    host_parts,
    kv_bytes_per_token,
    kv_tokens,
    learner_parts,
    problems,
    replica_parts,
    replica_share,
)
from recipes.rstar2.parts.memory.model import PUBLIC, configuration, model_of
from recipes.rstar2.parts.memory.operations import operations, row
from recipes.rstar2.parts.memory.plan import GIB
from tests.support import memory_table
from tests.support.algo_fakes import batch, write_checkpoint
from tests.support.algo_gradients import build
from tests.support.memory_table import compared, measured

# As their cards and files have it; the 1.7B's file has the head a second time.
PUBLISHED = {
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen3-1.7B": 2_031_739_904 - 151936 * 2048,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen2-57B-A14B": 57_408_658_944,
    "Mixtral-8x7B": 46_702_792_704,
    "GLM-4.5-Air": 106_852_245_504,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
LORA = LearnerConfig(lora_rank=32)


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_are_those_of_the_published_model_and_adapters_those_of_peft(name):
    assert model_of(name).parameters == PUBLISHED[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration(name))
        plan = plan_of(model=name, lora_rank=LORA.lora_rank)
        add_adapters(model, plan.learner)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert plan.adapters == trained


def ragged(module, query, key, value, mask, *, scaling, s_aux=None, **given):
    """The kernel that a GPU runs (`packed_attention`), which fake tensors can go through."""
    ends = (given["cu_seq_lens_q"], given["cu_seq_lens_k"], given["max_length_q"], given["max_length_k"])
    if s_aux is not None:
        kernel = RaggedKernel(ends=ends[:2], longest=ends[2:], scale=scaling, span=(-1, 0))
        return with_sinks(query, key, value, s_aux, kernel).transpose(1, 2), None
    heads = (state[0].transpose(0, 1) for state in (query, key, value))
    return varlen_attn(*heads, *ends, scale=scaling, window_size=(-1, 0), **GROUPED)[None], None


def kept_bytes(model, tokens):
    """What autograd keeps of a forward pass, beside the weights."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(input_ids=ids, use_cache=False, **bounds([tokens], ids.device))
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("name", PUBLIC)
def test_a_layers_activations_are_what_autograd_keeps_of_the_model_on_fake_tensors(name):
    AttentionInterface.register("ragged", ragged)
    AttentionMaskInterface.register("ragged", window_of_mask)
    actual = []
    for layers in (2, 3):
        config = AutoConfig.for_model(**{**PUBLIC[name], "num_hidden_layers": layers})
        with FakeTensorMode():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="ragged")
            actual.append(kept_bytes(model.eval(), 1000))
    assert 1.0 <= 1000 * layer_activations(model_of(name)) / (actual[1] - actual[0]) + 0.01 < 1.05


def small(layers):
    torch.manual_seed(0)
    fields = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": layers}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64}
    config = AutoConfig.for_model("qwen3", **fields, tie_word_embeddings=True)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=PACKED).eval()


def test_with_checkpointing_a_layer_keeps_its_input():
    register()
    actual = []
    for layers in (2, 3):
        model = small(layers)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in model.base_model.layers:
            layer.training = True
        actual.append(kept_bytes(model, 40))
    assert actual[1] - actual[0] == 40 * 2 * 64


def test_the_kv_cache_of_a_token_is_that_of_transformers(tmp_path):
    model = small(3)
    model.config.save_pretrained(tmp_path)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        cache = model(torch.zeros(1, 7, dtype=torch.long), use_cache=True).past_key_values
    size = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert size == 7 * kv_bytes_per_token(model_of(str(tmp_path)))


@pytest.fixture
def group(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def local(tensors):
    return sum(tensor.to_local().nbytes for tensor in tensors)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_weights_moments_and_gradients_are_those_of_the_learner(group, tmp_path, lora_rank):
    source = write_checkpoint(tmp_path / "model")
    trainer = build(source, tmp_path / "weights", lora_rank=lora_rank)
    kept = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: kept.append(local(each.grad for each in trainer.trained if each.grad is not None))
    )
    trainer.train(batch(4))
    moments = [
        value.to_local().nbytes
        for state in trainer.optimizer.state.values()
        for name, value in state.items()
        if name.startswith("exp_avg")
    ]
    parts = learner_moments(plan_of(model=source, devices=1, lora_rank=lora_rank, max_tokens=64))["layers"]
    assert parts["weights"] == local(trainer.scorer.parameters())
    assert parts["AdamW's moments"] == sum(moments)
    assert parts["gradients"] == max(kept)


def plan_of(*, model="Qwen2.5-7B-Instruct", max_tokens=8192, **given):
    names = ("devices", "memory_gb", "learner_ranks", "tensor_parallel")
    own = {name: given.pop(name) for name in names if name in given}
    return Config(model=str(model), max_tokens=max_tokens, learner=LearnerConfig(**given), **own).plan()


@pytest.mark.parametrize("row", measured(), ids=lambda row: str(row["cell"]))
def test_it_is_near_what_the_real_learner_allocates_and_executes_on_fake_gpus(row):
    actual, computed = compared(row)
    assert computed["load"] == pytest.approx(actual["load"], rel=0.1)
    assert computed["train"] == pytest.approx(actual["train"], rel=0.1)
    assert computed["needed"] == pytest.approx(actual["needed"], rel=0.01)
    assert computed["executed"] == pytest.approx(actual["executed"], rel=0.02)


def test_the_table_of_the_page_is_made_from_the_measurements():
    assert memory_table.PAGE.read_text() == memory_table.page(), "run python -m tests.support.memory_table"


def test_memory_follows_what_it_is_divided_by():
    peaks = [sum(learner_parts(plan_of(devices=count)).values()) for count in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    kinds = ("none", "selective", "attention", "full")
    kept = [kept_activations(plan_of(activation_checkpointing=kind)) for kind in kinds]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] < kept[0] / 10
    again, away = (plan_of(activation_checkpointing="full", activation_offload=offload) for offload in (False, True))
    assert learner_moments(away)["layers"]["activations"] < learner_moments(again)["layers"]["activations"]
    assert host_parts(away)["activations"] == 8 * 28 * 2 * 3584 * 8192, "the inputs of 28 layers of eight ranks"
    assert kv_tokens(plan_of(tensor_parallel=2)) > 2 * kv_tokens(plan_of(tensor_parallel=1))
    assert "reference" in learner_parts(plan_of(reference_kl_coef=0.1))


def test_published_weights_lie_in_host_memory():
    """Those that go from GPU to GPU are pinned: PyTorch takes the next power of two for them."""
    by_turns, apart = plan_of(), plan_of(learner_ranks=4)
    assert host_parts(by_turns)["published weights (/dev/shm)"] == 4 * by_turns.model.parameters
    assert host_parts(apart)["published weights (pinned)"] == 16 * GIB
    assert 8 * GIB < 2 * apart.model.parameters < 16 * GIB


def test_more_is_executed_the_less_is_kept():
    kinds = ("none", "selective", "attention", "full")
    plans = [plan_of(model="Qwen3-14B", activation_checkpointing=kind) for kind in kinds]
    counted = [operations(plan, tokens=4000, targets=3200) for plan in plans]
    assert len({each.needed for each in counted}) == 1
    ceilings = [each.mfu("FA2") for each in counted]
    assert ceilings == sorted(ceilings, reverse=True)
    assert ceilings[-1] == pytest.approx(0.45, abs=0.01), "full checkpointing costs a quarter"
    assert counted[-1].mfu("FA3") > ceilings[-1]


def test_a_replica_that_shares_its_gpu_takes_what_the_learner_leaves():
    parts = replica_parts(plan_of(devices=4, activation_checkpointing="full"))
    assert sum(parts.values()) < 0.9 * 80 * GIB
    crowded = plan_of(devices=1)
    assert sum(replica_parts(crowded).values()) + 4 * crowded.model.parameters < 80 * GIB


def test_the_reports_model_fits_on_eight_gpus_without_offload():
    plan = fitting(Config(model="Qwen3-14B").plan())
    assert (plan.learner.activation_checkpointing, plan.learner.activation_offload) == ("attention", False)
    assert plan.max_tokens == 14336


@pytest.mark.parametrize(
    ("plan", "changed"),
    [
        (plan_of(memory_gb=60), "learner.activation_checkpointing=selective"),
        (plan_of(memory_gb=40), "learner.activation_checkpointing=attention"),
        (plan_of(devices=1, activation_checkpointing="full"), "learner.activation_checkpointing=full"),
        (plan_of(max_tokens=65536, memory_gb=200), "rollout.max_tokens=32768"),
        (plan_of(devices=1), "learner.lora_rank=32"),
        (plan_of(model="Qwen3-14B", max_tokens=32768, memory_gb=48), "learner.context_parallel=2"),
        (plan_of(model="Qwen3-14B", memory_gb=36), "tensor_parallel=2"),
        (plan_of(model="Qwen2-57B-A14B", max_tokens=12288), "tensor_parallel=4"),
        (plan_of(model="GLM-4.5-Air", max_tokens=12288, devices=16), "tensor_parallel=8"),
    ],
)
def test_what_does_not_fit_is_changed_until_it_fits(plan, changed):
    assert problems(plan)
    better = fitting(plan)
    assert problems(better) == []
    assert changed in command_of(better).split()


def test_a_mixture_gets_adapters_of_attention_alone():
    """Experts are fused, so a layer has no projections of theirs by name."""
    plan = fitting(plan_of(model="Qwen3-30B-A3B", lora_rank=16))
    assert "learner.lora_targets=q_proj,k_proj,v_proj,o_proj" in command_of(plan).split()
    assert problems(plan_of(model="Qwen3-30B-A3B", max_tokens=32768, activation_checkpointing="full"))


def test_hybrid_sharding_divides_weights_over_a_host():
    alone, hybrid, full = (
        learner_moments(plan_of(model="Qwen3-30B-A3B", devices=devices, sharding=sharding))["layers"]["weights"]
        for devices, sharding in ((8, "full"), (64, "hybrid"), (64, "full"))
    )
    assert hybrid == alone
    assert full == pytest.approx(alone / 8, rel=0.01)


def test_experts_are_given_to_ranks_whole():
    """Eight experts on sixteen ranks lie on eight of them."""
    eight, sixteen = (plan_of(model="Mixtral-8x7B", devices=devices) for devices in (8, 16))
    assert sixteen.of_a_rank(sixteen.weights) > 0.95 * eight.of_a_rank(eight.weights)
    uneven = plan_of(model="Qwen2-57B-A14B", devices=6)
    assert uneven.of_a_rank(uneven.model.experts) * 64 == uneven.model.experts * 11


def test_heads_must_be_divided():
    assert any("tensor_parallel=3" in problem for problem in problems(plan_of(devices=6, tensor_parallel=3)))
    assert any("context_parallel=3" in problem for problem in problems(plan_of(devices=6, context_parallel=3)))


def test_long_rows_of_a_mixture_are_shared_so_that_all_weights_are_trained():
    long = plan_of(model="Qwen3-30B-A3B", max_tokens=32768, tensor_parallel=2)
    assert problems(long)
    better = fitting(long).learner
    assert (better.context_parallel, better.lora_rank) == (2, 0)


def test_ranks_that_share_a_row_divide_its_activations():
    alone, shared = (plan_of(max_tokens=32768, context_parallel=ranks) for ranks in (1, 4))
    least = learner_moments(alone)["layers"]["activations"]
    assert learner_moments(shared)["layers"]["activations"] == pytest.approx(least / 4)
    assert learner_moments(shared)["layers"]["weights"] == learner_moments(alone)["layers"]["weights"]


def test_a_rank_computes_its_part_of_a_row_and_gets_all_weights():
    alone, shared = (
        row(plan_of(max_tokens=32768, context_parallel=ranks), tokens=8192, targets=6000) for ranks in (1, 4)
    )
    assert (shared.computing, shared.needed) == pytest.approx((alone.computing / 4, alone.needed / 4))
    assert shared.moved == alone.moved


def test_what_it_prints_is_what_rl_takes(tmp_path, capsys):
    assert main(["model=Qwen3-14B", "tensor_parallel=2"]) == 0
    options = capsys.readouterr().out.splitlines()[-1].partition("rl.py ")[2].split()
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC["Qwen3-14B"]))
    (tmp_path / "train.jsonl").write_text('{"problem": "6 * 7?", "answer": "42"}\n')
    made = parse(rl.Config, [f"model={tmp_path}", f"data={tmp_path / 'train.jsonl'}", *options]).training(1, tmp_path)
    plan = fitting(Config(model="Qwen3-14B", tensor_parallel=2).plan())
    assert made.devices == plan.devices
    assert made.replicas_config.memory_share == replica_share(plan)
    assert made.rollout.max_tokens == plan.max_tokens
    assert replace(made.learner, **made.devices.learner_fields) == replace(
        made.learner,
        **made.devices.learner_fields,
        activation_checkpointing="attention",
        micro_batch_tokens=plan.max_tokens,
    )


def test_what_it_prints_for_supervised_training_is_what_sft_takes(tmp_path, capsys):
    asked = ["model=Qwen3-14B", "program=sft", "max_tokens=8192", "learner.micro_batch_tokens=16384"]
    assert main(asked) == 0
    printed = capsys.readouterr().out
    assert "replica" not in printed
    options = printed.splitlines()[-1].partition("sft.py ")[2].split()
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC["Qwen3-14B"]))
    (tmp_path / "train.jsonl").write_text('{"messages": []}\n')
    made = parse(sft.Config, [f"model={tmp_path}", f"data={tmp_path / 'train.jsonl'}", *options])
    plan = fitting(parse(Config, asked).plan())
    assert made.plan.devices == plan.devices.devices
    assert (made.max_tokens, made.learner.micro_batch_tokens) == (8192, 16384)
    fields = ("activation_checkpointing", "offload_optimizer", "micro_batch_tokens", "device", "dtype")
    assert all(getattr(made.learner_of(10), name) == getattr(plan.learner, name) for name in fields)


def test_it_ends_with_2_where_nothing_helps(capsys):
    assert main(["model=Qwen3-14B", "devices=1", "memory_gb=24"]) == 2
    assert "Fix: " in capsys.readouterr().err


def test_a_checkpoint_of_ones_own_is_read(tmp_path):
    source = write_checkpoint(tmp_path / "model")
    assert main([f"model={source}", "devices=1", "memory_gb=16", "max_tokens=64"]) == 0
    assert main([f"model={source / 'config.json'}", "devices=1", "memory_gb=16", "max_tokens=64"]) == 0


def refused(options, capsys):
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_bad_input_is_one_line(tmp_path, capsys):
    assert "Qwen3-14B" in refused(["model=nothing"], capsys)
    assert "train_router" in refused(["model=Qwen3-14B", "learner.train_router=false"], capsys)
    assert "learner.attention" in refused(["model=Qwen3-14B", "learner.attention=sdpa"], capsys)
    assert "lora_targets" in refused(["model=Qwen3-30B-A3B", "learner.lora_targets=q_proj,gate_proj"], capsys)
    assert "mean_tokens must be at most max_tokens=14336" in refused(["model=Qwen3-14B", "mean_tokens=20000"], capsys)
    assert "devices must be positive" in refused(["model=Qwen3-14B", "devices=0"], capsys)
    assert "learner_ranks=9" in refused(["model=Qwen3-14B", "learner_ranks=9"], capsys)
    assert "tensor_parallel=3" in refused(["model=Qwen3-14B", "tensor_parallel=3"], capsys)
    assert "program=sft" in refused(["model=Qwen3-14B", "program=sft", "learner_ranks=4"], capsys)
    file = tmp_path / "config.json"
    for text in ("{", "[]", json.dumps({"model_type": "nothing"}), json.dumps({"model_type": "gpt2"})):
        file.write_text(text)
        assert "model: " in refused([f"model={tmp_path}"], capsys)
