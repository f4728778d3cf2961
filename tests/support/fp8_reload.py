"""A model whose weights are quantised to FP8 when they arrive, loaded and loaded again on the CPU.

    python -m tests.support.fp8_reload fp8_per_channel

Prints one JSON object. vLLM's model, loader, layerwise reload and our half of the transfer are the real ones. In place
of two things that its CPU build lacks there are stand-ins: the kernel that rounds with one scale for a tensor, and an
accelerator's memory cache. Blocks (fp8_per_block) need a CPU with AMX.
"""

import json
import sys
import tempfile
from pathlib import Path

from engine.replica.config import ReplicaConfig, prepare_environment
from tests.support.paths import TINY

FP8 = 2.0**-4  # the largest relative error of a rounding to three bits after the leading one


class Quantized(ReplicaConfig):
    def arguments(self, index):
        return ReplicaConfig.arguments(self, index) | {"quantization": sys.argv[1]}


def stand_ins():
    import torch
    from vllm import _custom_ops as ops

    def scaled_fp8_quant(weight, scale, **_):
        largest = torch.finfo(torch.float8_e4m3fn).max
        return (weight.float() / scale).clamp(-largest, largest).to(torch.float8_e4m3fn), scale

    torch.accelerator.empty_cache = lambda: None
    if sys.argv[1] == "fp8_per_tensor":
        ops.scaled_fp8_quant = scaled_fp8_quant


def load(config):
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader import get_model

    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        return get_model(vllm_config=config)


def worst(model, weights):
    """The largest error of a quantised layer, relative to the largest weight of a row that shares a scale."""
    errors = {}
    for name, module in model.named_modules():
        if getattr(getattr(module, "weight", None), "dtype", None) is not torch.float8_e4m3fn:
            continue
        parent, _, leaf = name.rpartition(".")
        parts = model.packed_modules_mapping.get(leaf, [leaf])
        wanted = torch.cat([weights[f"{parent}.{part}.weight"] for part in parts]).float()
        scale = module.weight_scale.float().reshape(-1, 1)
        found = module.weight.float().t() * scale
        errors[name] = float((found - wanted).abs().max() / wanted.abs().max())
    return errors


def main():
    from vllm import AsyncEngineArgs

    import engine.replica.cpu_weight_loader
    from engine.replica.weight_transfer import Published, ShmWeightTransfer, mapped

    engine.replica.cpu_weight_loader.MODELS = ()  # it is loaded as on GPUs
    stand_ins()
    config = AsyncEngineArgs(
        **Quantized(checkpoint=str(TINY), dtype="bfloat16", max_model_len=256).arguments(0)
    ).create_engine_config()
    model = load(config)
    old = mapped(TINY / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    noise = {name: torch.randn(weight.shape, generator=generator) for name, weight in old.items()}
    new = {name: (weight + noise[name] * weight.float().std()).to(weight.dtype) for name, weight in old.items()}
    before = worst(model, old)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}

    transfer = object.__new__(ShmWeightTransfer)
    transfer.model, transfer.model_config, transfer.device = model, config.model_config, torch.device("cpu")
    transfer.parallel_config = config.parallel_config
    found = {"layers": len(before), "before": max(before.values()), "stale": min(worst(model, new).values())}
    for number, weights in enumerate((new, old, new)):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "weights.safetensors"
            save_file(weights, file)
            transfer.start_weight_update()
            transfer.receive_weights(Published(path=str(file), version=number, reader="one"))
            transfer.finish_weight_update()
    found["after"] = max(worst(model, new).values())
    found["moved"] = [name for name, parameter in model.named_parameters() if parameter.data_ptr() != places[name]]
    embedding = model.model.embed_tokens.weight
    found["embedding"] = bool(torch.equal(embedding[: len(new["model.embed_tokens.weight"])].cpu(), new["model.embed_tokens.weight"]))
    print(json.dumps(found))


if __name__ == "__main__":
    prepare_environment()
    import torch
    from safetensors.torch import save_file

    main()
