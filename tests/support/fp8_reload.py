"""A model whose weights are quantised to FP8 when they arrive, loaded and loaded again on the CPU.

    python -m tests.support.fp8_reload fp8_per_channel

Prints one JSON object. vLLM's model, loader and layerwise reload are the real ones, and so is our half of the transfer.
Two things that vLLM's build for CPUs lacks have stand-ins: the kernel that rounds with one scale for a tensor, and the
memory cache of an accelerator. Blocks (fp8_per_block) need a CPU with AMX, and a GPU's own kernels a GPU.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.replica.config import ReplicaConfig, prepare_environment
from tests.support.paths import TINY

FP8 = torch.float8_e4m3fn


class Quantized(ReplicaConfig):
    def arguments(self, index):
        return ReplicaConfig.arguments(self, index) | {"quantization": sys.argv[1]}


def put_stand_ins():
    from vllm import _custom_ops as ops

    def scaled_fp8_quant(weight, scale, **_):
        largest = torch.finfo(FP8).max
        return (weight.float() / scale).clamp(-largest, largest).to(FP8), scale

    torch.accelerator.empty_cache = lambda: None
    if sys.argv[1] == "fp8_per_tensor":
        ops.scaled_fp8_quant = scaled_fp8_quant


def loaded(config):
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader import get_model

    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        return get_model(vllm_config=config)


def errors(model, weights):
    """Returns the largest error of each quantised layer over its largest weight. weights: by Hugging Face name."""
    result = []
    for name, module in model.named_modules():
        if getattr(getattr(module, "weight", None), "dtype", None) is not FP8:
            continue
        parent, _, leaf = name.rpartition(".")
        parts = model.packed_modules_mapping.get(leaf, [leaf])
        wanted = torch.cat([weights[f"{parent}.{part}.weight"] for part in parts]).float()
        scaled = module.weight.float().t() * module.weight_scale.float().reshape(-1, 1)
        result.append(float((scaled - wanted).abs().max() / wanted.abs().max()))
    return result


def main():
    from vllm import AsyncEngineArgs

    import engine.replica.cpu_weight_loader
    from engine.replica.weight_transfer import Published, ShmWeightTransfer, mapped

    engine.replica.cpu_weight_loader.MODELS = ()  # it is loaded as on GPUs
    put_stand_ins()
    settings = Quantized(checkpoint=str(TINY), dtype="bfloat16", max_model_len=256)
    config = AsyncEngineArgs(**settings.arguments(0)).create_engine_config()
    model = loaded(config)
    old = mapped(TINY / "model.safetensors")
    torch.manual_seed(1)
    new = {name: weight + weight.float().std().to(weight) * torch.randn_like(weight) for name, weight in old.items()}
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    before, stale = errors(model, old), errors(model, new)

    transfer = object.__new__(ShmWeightTransfer)
    transfer.model, transfer.model_config, transfer.device = model, config.model_config, torch.device("cpu")
    transfer.parallel_config = config.parallel_config
    for version, weights in enumerate((new, old, new)):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "weights.safetensors")
            save_file(weights, file)
            transfer.start_weight_update()
            transfer.receive_weights(Published(path=str(file), version=version, reader=""))
            transfer.finish_weight_update()
    embedding = new["model.embed_tokens.weight"]
    result = {
        "layers": len(before),
        "before": max(before),
        "stale": min(stale),
        "after": max(errors(model, new)),
        "moved": [name for name, parameter in model.named_parameters() if parameter.data_ptr() != places[name]],
        "embedding": torch.equal(model.model.embed_tokens.weight[: len(embedding)], embedding),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    prepare_environment()
    main()
