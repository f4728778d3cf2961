"""How engines are configured: what is impossible is refused by name, what is possible reaches vLLM's arguments."""

import json
import re

import pytest

from engine.replica.adapter_folder import peft_folder
from engine.replica.config import ReplicaConfig, check_sleep


def config(**options):
    return ReplicaConfig(**{"checkpoint": "x", **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"checkpoint": "/a[1]/b"}, r"checkpoint must be a path without '\[', .* got '/a\[1\]/b'"),
        ({"kv_blocks": 32}, "kv_blocks 32 .*max_model_len 1024.*at least 33 blocks"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"step_deadline_s": 0.0}, "step_deadline_s must be positive, got 0.0"),
        ({"dtype": "bf16"}, "dtype must be one of 'float32', 'bfloat16', got 'bf16'"),
        ({"dtype": "float16", "devices": (0,)}, "dtype must be one of 'float32', 'bfloat16', got 'float16'"),
        ({"block_size": 48}, "block_size must be a multiple of 32 on the CPU, got 48"),
        ({"tensor_parallel": 0}, "tensor_parallel must divide the 0 devices, got 0"),
        ({"tensor_parallel": 2, "devices": (0, 1, 2)}, "tensor_parallel must divide the 3 devices, got 2"),
        ({"devices": (0, 0)}, r"devices must differ, got \(0, 0\)"),
        ({"weight_transfer": "nccl"}, "weight_transfer must be one of .*, got 'nccl'"),
        ({"weight_transfer": "disk", "devices": (0,)}, "weight_transfer must be one of .*, got 'disk'"),
        ({"weight_transfer": "adapter"}, 'lora_rank must be positive with weight_transfer "adapter" alone, got 0'),
        ({"lora_rank": 8}, 'lora_rank must be positive with weight_transfer "adapter" alone, got 8'),
        ({"weight_transfer": "adapter", "lora_rank": 8}, "lora_targets must name the layers .* got ()"),
        (
            {"weight_transfer": "adapter", "lora_rank": 600, "lora_targets": ("q_proj",)},
            "lora_rank must be at most 512 for vLLM, got 600",
        ),
        (
            {"weight_transfer": "adapter", "lora_rank": 8, "lora_targets": ("q_proj",), "adapters": 0},
            "adapters must be at least 1, got 0",
        ),
        ({"quantization": "fp8_per_block"}, "quantization must be None on the CPU, got 'fp8_per_block'"),
        ({"quantization": "int3", "devices": (0,)}, "quantization must be .*, got 'int3'"),
        ({"kv_offload_bytes": 1}, "kv_offload_bytes must be 0 on the CPU, got 1"),
        ({"kv_offload_bytes": -1, "devices": (0,)}, "kv_offload_bytes must be at least 0, got -1"),
        ({"memory_share": 0.5}, "memory_share must be None on the CPU, got 0.5"),
        ({"eager": True}, "eager must be False on the CPU, .* got True"),
        ({"memory_share": 0.0, "devices": (0,)}, "memory_share must be None or in \\(0, 1\\], got 0.0"),
        ({"memory_share": 1.1, "devices": (0,)}, "memory_share must be None or in \\(0, 1\\], got 1.1"),
    ],
)
def test_an_impossible_replica_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        config(**options)


def test_each_replica_has_its_own_gpus():
    pairs = config(devices=(0, 1, 4, 5), tensor_parallel=2, kv_blocks=None, block_size=16, kv_offload_bytes=3 << 29)
    assert [pairs.devices_of(index) for index in (0, 1)] == [(0, 1), (4, 5)]
    with pytest.raises(ValueError, match=r"devices \(0, 1, 4, 5\) are too few for replica 2"):
        pairs.devices_of(2)
    arguments = pairs.arguments(1)
    assert arguments["device_ids"] == [4, 5]
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["kv_offloading_size"] == 1.5
    assert arguments["num_gpu_blocks_override"] is None
    assert "distributed_executor_backend" not in arguments
    assert config(devices=(3,)).arguments(0)["kv_offloading_size"] is None


def test_vllm_gets_room_for_the_versions_of_an_adapter():
    targets = ("q_proj", "mlp.up_proj")
    arguments = config(weight_transfer="adapter", lora_rank=12, lora_targets=targets, adapters=3).arguments(0)
    assert arguments["lora_target_modules"] == ["q_proj", "up_proj"], "vLLM knows whole names and last parts"
    assert [arguments[name] for name in ("max_lora_rank", "max_loras", "max_cpu_loras")] == [16, 3, 4]
    assert "enable_lora" not in config().arguments(0)


def test_vllm_quantises_what_comes_on_gpus():
    assert config(devices=(0,), quantization="fp8_per_block").arguments(0)["quantization"] == "fp8_per_block"
    assert config(devices=(0,)).arguments(0)["quantization"] is None


def test_an_adapter_becomes_a_folder_as_peft_has_it(tmp_path):
    file = tmp_path / "weights-3.safetensors"
    header = json.dumps({"__metadata__": {"peft": '{"r": 4}'}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    for _ in range(2):  # two replicas of a host
        folder = peft_folder(file)
    assert sorted(found.name for found in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((folder / "adapter_config.json").read_text()) == {"r": 4}
    assert (folder / "adapter_model.safetensors").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("header", [b'{"__metadata__": {"format": "pt"}}', b"{}", b"\xff"])
def test_weights_that_are_no_adapter_are_refused_by_name(tmp_path, header):
    file = tmp_path / "weights-3.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"weights-3\.safetensors holds no adapter"):
        peft_folder(file)
    assert list(tmp_path.iterdir()) == [file]


def test_a_replica_leaves_room_for_a_learner_that_rests_on_its_gpu():
    """vLLM refuses to start where less is free than it is to take: a replacement would never come."""
    share = lambda **options: config(devices=(0,), **options).arguments(0)["gpu_memory_utilization"]  # noqa: E731
    assert share() == 0.92
    assert share(sleeps=True) == 0.6
    assert share(memory_share=0.5) == share(memory_share=0.5, sleeps=True) == 0.5


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_blocks": 33}, {"kv_blocks": 4096, "max_num_seqs": 64}, {"max_model_len": 32768, "kv_blocks": 1100}],
)
def test_on_the_cpu_a_step_may_compute_all_that_the_kv_cache_holds(options):
    """So that no prefill is split."""
    replica = config(**options)
    most = replica.arguments(7)["max_num_batched_tokens"]
    assert most >= replica.blocks * replica.block_size


def test_the_kv_cache_is_what_a_gpu_holds_and_on_the_cpu_enough_for_the_longest_sequence():
    assert config(devices=(0,)).arguments(0)["num_gpu_blocks_override"] is None
    assert config(devices=(0,), kv_blocks=99).arguments(0)["num_gpu_blocks_override"] == 99
    assert config().arguments(0)["num_gpu_blocks_override"] == 1024
    assert config(max_model_len=1 << 16).arguments(0)["num_gpu_blocks_override"] == 2049, "and vLLM's own block"


def test_a_step_on_a_gpu_computes_more_than_vllm_would_by_itself():
    assert config(devices=(0,)).arguments(0)["max_num_batched_tokens"] == 8192
    assert config(devices=(0,), max_num_seqs=10000).arguments(0)["max_num_batched_tokens"] == 10000


@pytest.mark.parametrize("version", ["0.26.0", "0.31.2+cu130", "0.9.1"])
def test_a_vllm_that_loses_block_tables_asleep_is_refused(version):
    with pytest.raises(ValueError, match=f"vLLM {re.escape(version)} loses block tables"):
        check_sleep(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0rc1", "1.0", "dev"])
def test_a_vllm_that_keeps_them_is_not(version):
    check_sleep(version)


def test_on_the_cpu_a_replica_has_no_device():
    assert config().devices_of(7) == ()
    assert "device_ids" not in config().arguments(7)


def test_vllm_knows_the_arguments():
    """In its source, so that nothing heavy is imported: a field of AsyncEngineArgs for each."""
    import importlib.util
    import re
    from pathlib import Path

    [folder] = importlib.util.find_spec("vllm").submodule_search_locations
    source = Path(folder, "engine/arg_utils.py").read_text()
    for name in config(devices=(0,)).arguments(0) | config().arguments(0):
        assert re.search(rf"^    {name}\b", source, re.MULTILINE), name
