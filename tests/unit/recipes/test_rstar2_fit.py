"""Memory arithmetic against what PyTorch and transformers really make; settings that fit; what is said where not."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from algo.learner.config import LearnerConfig
from algo.learner.model.attention import PACKED, bounds, register
from algo.learner.model.lora import add_adapters
from algo.learner.model.scorer import LOGIT_ROWS
from engine.assembly.devices import DevicePlan
from engine.console.options import parse
from recipes.rstar2 import rl
from recipes.rstar2.fit import Config, command_of, device_plan, fix, main, verdict, with_best_share
from recipes.rstar2.parts.memory import memory
from recipes.rstar2.parts.memory.memory import GIB, Plan, Shape, layer_activation_bytes, learner_parts, memory_of
from recipes.rstar2.parts.memory.sizes import SHAPES, SIZES
from tests.support.algo_fakes import batch, write_checkpoint
from tests.support.algo_gradients import build

PUBLISHED = {  # as their model cards have it, to the digit
    "SmolLM2-135M-Instruct": 134_515_008,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen3-14B": 14_768_307_200,
}
LORA = LearnerConfig(lora_rank=32)


def on_meta(fields):
    fields = dict(fields)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def count(parameters):
    return sum(parameter.numel() for parameter in parameters)


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_real_model_and_of_its_adapters(name):
    model, shape = on_meta(SHAPES[name]), Shape.of(SHAPES[name])
    assert shape.parameters == count(model.parameters()) == PUBLISHED[name]
    assert shape.layer_parameters == count(model.base_model.layers[0].parameters())
    with torch.device("meta"):
        add_adapters(model, LORA)
    trained = count(parameter for parameter in model.parameters() if parameter.requires_grad)
    assert shape.adapter_parameters(LORA.lora_rank, LORA.lora_targets) == trained


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen3", {"attention_bias": True}), ("mistral", {})],
)
def test_other_fields_of_a_family_are_counted_too(kind, fields):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = {"model_type": kind, **sizes, **fields}
    assert Shape.of(config).parameters == count(on_meta(config).parameters())
    written = AutoConfig.for_model(kind, **sizes, **fields).to_dict()
    assert Shape.of(written).parameters == Shape.of(config).parameters, "as save_pretrained writes it"


def small(kind, layers, dtype):
    torch.manual_seed(0)
    fields = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": layers}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64}
    config = AutoConfig.for_model(kind, **fields, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PACKED).eval()
    return model, Shape.of({"model_type": kind, **fields})


def saved_bytes(model, tokens):
    """What autograd keeps of a forward pass, beside the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(input_ids=ids, use_cache=False, **bounds([tokens], ids.device))
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_activations_of_a_layer_are_what_autograd_saves_to_the_byte(kind, dtype, lora_rank):
    register()
    learner, tokens, found = LearnerConfig(dtype=dtype, lora_rank=lora_rank), 40, []
    for layers in (2, 3):
        model, shape = small(kind, layers, getattr(torch, dtype))
        if lora_rank:
            add_adapters(model, learner)
            model.to(getattr(torch, dtype))
        found.append(saved_bytes(model, tokens))
    assert found[1] - found[0] == tokens * layer_activation_bytes(shape, learner, on_gpu=False)


def test_with_checkpointing_a_layer_saves_its_input():
    register()
    found = []
    for layers in (2, 3):
        model, shape = small("qwen3", layers, torch.bfloat16)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in model.base_model.layers:
            layer.training = True
        found.append(saved_bytes(model, 40))
    assert found[1] - found[0] == 40 * 2 * shape.hidden


def test_the_kv_cache_of_a_token_is_that_of_transformers():
    model, shape = small("qwen3", 3, torch.bfloat16)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        cache = model(torch.zeros(1, 7, dtype=torch.long), use_cache=True).past_key_values
    size = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert size == 7 * shape.kv_bytes_per_token


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
def test_what_the_learner_keeps_is_what_its_tensors_take(group, tmp_path, lora_rank):
    source = write_checkpoint(tmp_path / "model")
    trainer = build(source, tmp_path / "weights", lora_rank=lora_rank)
    kept = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: kept.append(local(each.grad for each in trainer.trained if each.grad is not None))
    )
    trainer.train(batch(4))
    trainer.publisher.publish(1)
    trainer.publisher.publish(2)
    plan = Plan(shape=Shape.read(source), devices=DevicePlan(), learner=trainer.config, max_tokens=64, memory_bytes=GIB)
    parts = learner_parts(plan)
    moments = [
        value.to_local().nbytes
        for state in trainer.optimizer.state.values()
        for name, value in state.items()
        if name.startswith("exp_avg")
    ]
    assert parts["weights (float32)"] == local(trainer.scorer.parameters())
    assert parts["AdamW moments (float32)"] == sum(moments)
    assert parts["gradients (float32)"] == max(kept)
    files = [path.stat().st_size for path in (tmp_path / "weights").glob("*.safetensors")]
    assert parts["published weights"] == pytest.approx(sum(files), rel=0.01), "but for the files' headers"


def test_constants_are_those_of_the_learner():
    assert memory.LOGIT_ROWS == LOGIT_ROWS


@pytest.mark.parametrize("name", SIZES)
def test_each_setting_fits_on_its_gpus_and_is_not_far_too_small_for_them(name):
    size = SIZES[name]
    found = memory_of(Config(size=name).plan())
    assert found.problems == ()
    assert found.longest >= size.max_tokens
    assert size.memory_share <= with_best_share(found.plan).memory_share
    assert found.sequences * found.plan.devices.replicas >= size.group_size
    assert found.plan.learner.device == "cuda"
    assert memory_of(Config(size=name, memory_gb=size.memory_gb / 4).plan()).problems


@pytest.mark.parametrize("name", SIZES)
def test_what_a_setting_prints_is_what_rl_takes(name, tmp_path):
    size = SIZES[name]
    plan = Config(size=name).plan()
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[size.model]))
    (tmp_path / "train.jsonl").write_text('{"problem": "6 * 7?", "answer": "42"}\n')
    kind = rl.ReleaseConfig if size.protocol == "release" else rl.Config
    words = [f"model={tmp_path}", f"data={tmp_path / 'train.jsonl'}", "stage=all", *command_of(plan, size).split()]
    made = parse(kind, words)
    stages = [made.training(number, tmp_path) for number in made.numbers]
    assert max(stage.rollout.max_tokens for stage in stages) == plan.max_tokens == size.max_tokens
    for stage in stages:
        assert stage.devices == plan.devices
        assert stage.replicas_config.memory_share == size.memory_share
        assert stage.replicas_config.kv_blocks is None, "what the GPU holds"
        assert (stage.prompts_per_step, stage.group.samples) == (size.prompts_per_step, 2 * size.group_size)
        learner = replace(stage.learner, **stage.devices.learner_fields)
        for field in (
            "lr",
            "minibatches",
            "micro_batch_tokens",
            "activation_checkpointing",
            "activation_offload",
            "lora_rank",
        ):
            assert getattr(learner, field) == getattr(plan.learner, field)


QWEN = Shape.of(SHAPES["Qwen2.5-7B-Instruct"])


def a_plan(*, count=8, ranks=None, tensor_parallel=1, gigabytes=80, max_tokens=8192, share=None, host=None, **fields):
    devices = device_plan(count=count, ranks=ranks, tensor_parallel=tensor_parallel)
    return Plan(
        shape=QWEN,
        devices=devices,
        learner=replace(LearnerConfig(**fields), **devices.learner_fields),
        max_tokens=max_tokens,
        memory_bytes=gigabytes * GIB,
        memory_share=share,
        host_bytes=host,
    )


def test_memory_follows_what_it_is_divided_by():
    peaks = [sum(learner_parts(a_plan(count=count)).values()) for count in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    assert learner_parts(a_plan(count=8))["weights (float32)"] == QWEN.parameters * 4 // 8
    short, long = (learner_parts(a_plan(max_tokens=tokens))["activations"] for tokens in (8192, 16384))
    assert long == 2 * short
    saved, recomputed = (learner_parts(a_plan(activation_checkpointing=flag)) for flag in (False, True))
    assert recomputed["activations"] < saved["activations"] / 5
    assert sum(recomputed.values()) < sum(saved.values())
    away = a_plan(activation_checkpointing=True, activation_offload=True)
    given, kept = recomputed["activations"], learner_parts(away)["activations"]
    assert given - kept == (QWEN.layers - 2) * 2 * QWEN.hidden * away.pass_tokens
    assert memory_of(away).host["activations"] == 8 * QWEN.layers * 2 * QWEN.hidden * away.pass_tokens, "of eight ranks"
    assert memory_of(a_plan(tensor_parallel=2)).kv_tokens > 2 * memory_of(a_plan(tensor_parallel=1)).kv_tokens
    assert "reference (float32)" in learner_parts(a_plan(reference_kl_coef=0.1))
    assert "reference (float32)" not in learner_parts(a_plan(reference_kl_coef=0.1, lora_rank=8))


def test_published_weights_take_a_gpus_memory_only_where_they_go_from_gpu_to_gpu():
    """By turns they are files in host memory, two versions of them; adapters alone are small."""
    whole = 2 * QWEN.parameters
    by_turns, apart = memory_of(a_plan(lora_rank=8)), memory_of(a_plan(ranks=4))
    assert "published weights" not in by_turns.learner
    assert (by_turns.host["published weights"], apart.host["published weights"]) == (2 * whole, 0)
    assert apart.learner["published weights"] == whole
    learner = replace(apart.plan.learner, lora_rank=8, weight_transfer="adapter")
    adapters = memory_of(replace(apart.plan, learner=learner))
    assert "published weights" not in adapters.learner
    assert adapters.host["published weights"] < whole / 100


def test_the_reports_model_fits_on_eight_gpus_without_offload():
    plan = Config(size="qwen3-14b-8gpu-80gb").plan()
    assert not plan.learner.activation_offload
    assert memory_of(plan).learner_peak < 0.7 * plan.memory_bytes


def test_learner_and_replicas_that_take_turns_must_fit_beside_each_other():
    crowded = memory_of(a_plan(count=4, activation_checkpointing=True, share=0.95))
    assert [problem for problem in crowded.problems if "95%" in problem]
    better = with_best_share(crowded.plan)
    assert memory_of(better).problems == ()
    assert memory_of(replace(better, memory_share=better.memory_share + 0.02)).problems
    apart = a_plan(ranks=4, share=0.92, activation_checkpointing=True)
    assert memory_of(apart).problems == (), "where they do not share, a replica has its GPU alone"


@pytest.mark.parametrize(
    ("plan", "changed"),
    [
        (a_plan(gigabytes=72), "activation_checkpointing=true"),
        (a_plan(activation_checkpointing=True, share=0.95), "memory_share="),
        (a_plan(activation_checkpointing=True, micro_batch_tokens=400_000), "micro_batch_tokens=8192"),
        (a_plan(gigabytes=48, activation_checkpointing=True, ranks=4), "learner_ranks=8"),
        (a_plan(max_tokens=65536, gigabytes=200, activation_checkpointing=True), "max_tokens=32768"),
        (a_plan(count=1, activation_checkpointing=True), "lora_rank=32"),
    ],
)
def test_what_does_not_fit_is_told_what_to_change_and_then_fits(plan, changed):
    assert memory_of(plan).problems
    better = fix(plan)
    assert better is not None
    assert memory_of(better).problems == ()
    assert changed in verdict(memory_of(plan)).partition("Fix: ")[2]


def test_what_no_change_makes_fit_asks_for_other_gpus():
    assert "GPUs" in verdict(memory_of(a_plan(gigabytes=12))).partition("Fix: ")[2]


def test_host_memory_and_heads_are_checked():
    plan = a_plan(activation_checkpointing=True, share=0.5)
    assert memory_of(replace(plan, host_bytes=100 * GIB)).problems
    assert not memory_of(replace(plan, host_bytes=400 * GIB)).problems
    odd = a_plan(activation_checkpointing=True, count=6, tensor_parallel=3, share=0.5)
    assert any("tensor_parallel=3" in problem for problem in memory_of(odd).problems)


def test_the_program_says_what_to_pass_and_ends_with_2_where_it_does_not_fit(capsys):
    assert main([]) == 0
    overview = capsys.readouterr().out
    assert all(name in overview for name in SIZES)
    assert main(["size=qwen2.5-7b-8gpu"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "learner_ranks=8",
        " memory_share=0.85",
        " micro_batch_tokens=20480",
        "protocol=release",
    ):
        assert words in shown
    assert "GPU" in shown.partition("Arithmetic only")[2]
    assert main(["size=qwen2.5-7b-8gpu", "devices=1"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    remedy = message.partition("Fix: ")[2].split()
    assert remedy
    assert main(["size=qwen2.5-7b-8gpu", "devices=1", *remedy]) == 0, "what it says can be passed as it stands"
    assert main(["size=qwen2.5-7b-8gpu", "learner_ranks=8", "replicas=8"]) == 0


def test_a_checkpoint_of_ones_own_is_read_and_the_cpu_is_a_device(tmp_path, capsys):
    source = write_checkpoint(tmp_path / "model")
    assert main([f"model={source}", "devices=0", "memory_gb=8", "max_tokens=64"]) == 0
    assert main([f"model={source / 'config.json'}", "devices=0", "memory_gb=0.1", "max_tokens=64"]) == 2
    assert "Fix: " in capsys.readouterr().err


def refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_bad_input_is_one_line(tmp_path, capsys):
    assert "Qwen3-14B" in refused(["model=nothing"], capsys)
    assert "qwen3-1.7b-1gpu" in refused(["size=nothing"], capsys)
    assert "learner_ranks=9" in refused(["model=Qwen3-14B", "devices=8", "learner_ranks=9"], capsys)
    assert "tensor_parallel=3" in refused(["model=Qwen3-14B", "devices=8", "tensor_parallel=3"], capsys)
    assert "replicas=3" in refused(["model=Qwen3-14B", "devices=8", "replicas=3"], capsys)
    assert "memory_share" in refused(["model=Qwen3-14B", "memory_share=1.5"], capsys)
    file = tmp_path / "config.json"
    file.write_text("{")
    assert str(file) in refused([f"model={tmp_path}"], capsys)
    file.write_text(json.dumps({"model_type": "mixtral"}))
    assert "'mixtral'" in refused([f"model={file}"], capsys)
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    assert "num_attention_heads" in refused([f"model={file}"], capsys)
    file.write_text("[]")
    assert str(file) in refused([f"model={file}"], capsys)
