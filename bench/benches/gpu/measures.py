"""What no other bench measures on a GPU; each writes one JSON object into a file.

    python -m bench.benches.gpu.measures NAME into=FILE [options]

doctor        which tool calls the jail can run here
quickstart    a short run of the quick start, its options as given
attention     trajectories side by side in one row against each alone: the same numbers, and how long
sleep         a replica gives its memory up and takes it back, and says what it said before; vLLM's log says which
              kernels, runner and scheduler it has
imports       the modules that an engine and a learner on a GPU import
rollouts      `rocstar bench rollout` with a model of 1.7B, whose options are given
mismatch      `rocstar bench mismatch` with that model, whose options are given
rl            LoRA training of the model that `shape` names, whose options are given
families      the learner's log-probabilities and gradients beside plain transformers', for each family of mixtures
experts       the products of a mixture's layer as the learner has them, beside a loop over its experts
pull          a replica on the second GPU is killed while it pulls weights from a learner on the first
resume        a quick start, its options as given, is killed while an engine starts, interrupted, and resumed
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from bench import ROOT
from bench.benches.gpu.model import model_at
from bench.benches.gpu.pull import pulled
from bench.benches.gpu.resume import resumed
from engine import metric_names as metric
from engine.console.options import Positional, Rest, parse
from engine.programs import rocstar
from engine.telemetry.gpus import seen
from recipes.tiny.task import SHIPPED

Name = Literal[
    "doctor",
    "quickstart",
    "attention",
    "families",
    "experts",
    "sleep",
    "imports",
    "rollouts",
    "mismatch",
    "rl",
    "pull",
    "resume",
]
MODULES = (
    "torch.nn.attention.varlen",
    "vllm.device_allocator.cumem",
    "vllm.distributed.device_communicators.pynccl",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "engine.replica.weight_transfer_gpu",
    "algo.weights.transport_gpu",
)
LENGTHS = (3000, 500, 1200, 4000, 700, 2600, 150, 2138)  # a row on a GPU has 14,288 tokens, a tenth on the CPU
HEADS, KEY_HEADS, WIDTH = 16, 8, 128  # as Qwen3-1.7B
SCORED = [[3 + 7 * number + index for index in range(200)] for number in range(4)]
EVEN = ROOT / "bench" / "benches" / "gpu" / "even.py"
MEDIANS = (
    metric.LEARNER_TOKENS_PER_S,
    metric.TOKENS_PER_S,
    metric.TIME_ROLLOUT_S,
    metric.TIME_LEARN_S,
    metric.TIME_SYNC_S,
    metric.TIME_STEP_S,
    metric.HOST_LOOP_CPU_SHARE,
    metric.HOST_LOOP_LAG_MAX_MS,
    metric.LEARNER_MFU,
    metric.LEARNER_PEAK_BYTES,
    metric.LEARNER_MISMATCH_FRESH_MEAN,
    metric.LEARNER_MISMATCH_FRESH_MAX,
    metric.CANARY_MEAN_ABS,
    metric.CANARY_MAX_ABS,
    metric.LEARNER_ROUTING_DIFFERS,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    name: Annotated[Name, Positional("what is measured")]
    into: Annotated[Path, "file that gets the JSON object"]
    device: Annotated[str, "cpu, cuda, or the number of a GPU"] = "cpu"
    checkpoint: Annotated[Path, "the model of sleep"] = SHIPPED
    shape: Annotated[
        Literal["qwen3-1.7b", "30b-a3b-4l", "small", "small-moe"], "the model of rollouts, mismatch, rl and pull"
    ] = "small"
    fields: Annotated[tuple[str, ...], Rest("options of what is started")] = ()

    @property
    def kind(self) -> str:
        """The kind of device: "cpu" or "cuda"."""
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def model(self) -> Path:
        return model_at(self.into.parent / f"model-{self.shape}", self.shape)


def doctor(_options: Options) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", rocstar.__name__, "doctor"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {"output": done.stdout + done.stderr, "exit_code": done.returncode}


def imports(_options: Options) -> dict[str, Any]:
    """Imports all modules in one process. If that fails each gets its own: one that fails may take others with it."""
    failed = {}
    if _failure(MODULES):
        failed = {module: failure for module in MODULES if (failure := _failure([module]))}
    return {"modules": len(MODULES), "failed": failed}


def _failure(modules: Sequence[str]) -> str:
    """Returns the last line of the error with which importing them ends, or ""."""
    code = f"from engine.replica.config import prepare_environment; prepare_environment(); import {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    return (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1] if done.returncode else ""


def quickstart(options: Options) -> dict[str, Any]:
    return _run_of("recipes/quickstart.py", options, "quickstart")


def rl(options: Options) -> dict[str, Any]:
    """Trains adapters of a random model to sample tokens with even ids; its curve says whether that is learnt."""
    data = options.into.with_suffix(".jsonl")
    rows = ({"question": f"Count to {number}.", "answer": str(number)} for number in range(512))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = (f"model={options.model}", f"data={data}", f"held_out={data}", f"reward={EVEN}:even", "tools=")
    return _run_of("recipes/train_on_file.py", options, "rl", *files)


def _run_of(recipe: str, options: Options, name: str, *more: str) -> dict[str, Any]:
    runs, name = options.into.parent / "runs", f"{name}-{int(time.time())}"
    arguments = [*more, *options.fields, f"runs={runs}", f"name={name}"]
    subprocess.run([sys.executable, recipe, *arguments], cwd=ROOT, check=True)
    summary = json.loads((runs / name / "summary.json").read_text())
    steps = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    middle = {
        name: statistics.median(row[name] for row in steps if name in row) for name in MEDIANS if _in(steps, name)
    }
    curve = [row[metric.REWARD] for row in steps if metric.REWARD in row]
    return {"summary": summary, "medians": middle, "curve": curve}


def _in(steps: list[dict[str, Any]], name: str) -> bool:
    return any(name in row for row in steps)


def rollouts(options: Options) -> dict[str, Any]:
    return _bench("rollout", options)


def mismatch(options: Options) -> dict[str, Any]:
    return _bench("mismatch", options)


def _bench(name: str, options: Options) -> dict[str, Any]:
    """Runs another bench with the model of these options."""
    arguments = [*options.fields, f"checkpoint={options.model}", f"json={options.into}"]
    subprocess.run([sys.executable, "-m", "bench", name, *arguments], cwd=ROOT, check=True)
    result: dict[str, Any] = json.loads(options.into.read_text())
    return result


def attention(options: Options) -> dict[str, Any]:
    import torch

    from algo.learner.model.attention import bounds, packed_attention

    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    lengths = LENGTHS if on_gpu else [length // 10 for length in LENGTHS]
    dtype = torch.bfloat16 if on_gpu else torch.float32
    torch.manual_seed(0)
    total = sum(lengths)
    made = [torch.randn(1, heads, total, WIDTH, device=device, dtype=dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, HEADS // KEY_HEADS

    def run(inputs: list[Any], given: list[int]) -> Any:
        query, key, value = inputs
        output, _ = packed_attention(module, query, key, value, None, scaling=WIDTH**-0.5, **bounds(given, device))
        output.float().sum().backward()
        return output.detach()

    def row() -> Any:
        return run([tensor.clone().requires_grad_() for tensor in made], list(lengths))

    def alone() -> Any:
        outputs, begin = [], 0
        for length in lengths:
            own = [tensor[:, :, begin : begin + length].clone().requires_grad_() for tensor in made]
            outputs.append(run(own, [length]))
            begin += length
        return torch.cat(outputs, dim=1)

    def seconds(work: Any) -> float:
        times_s = []
        for _ in range(5):
            if on_gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            if on_gpu:
                torch.cuda.synchronize()
            times_s.append(time.perf_counter() - began)
        return statistics.median(times_s)

    difference = float((row() - alone()).abs().max())
    row_s, alone_s = seconds(row), seconds(alone)
    return {"row_s": row_s, "alone_s": alone_s, "alone_over_row": alone_s / row_s, "difference": difference}


def families(options: Options) -> dict[str, Any]:
    from bench.benches.gpu.families import compared_families

    return compared_families(options.kind)


def experts(options: Options) -> dict[str, Any]:
    from bench.benches.gpu.families import compared_products

    return compared_products(options.kind)


def sleep(options: Options) -> dict[str, Any]:
    """Measures sleep and wake. On the CPU a replica holds nothing of a shared device, and only waits."""
    from engine.replica.config import ReplicaConfig, prepare_environment

    prepare_environment()
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"  # read when vLLM is imported
    from engine.replica.replica import Replica

    on_gpu = options.device != "cpu"

    def used_bytes() -> int:
        """Returns what all processes hold of the GPU's memory."""
        [gpu] = seen([int(options.device)]).each
        return gpu.total_bytes - gpu.free_bytes

    [weights] = options.checkpoint.glob("*.safetensors")  # sleep discards what the engine began with
    config = ReplicaConfig(
        checkpoint=str(options.checkpoint),
        max_model_len=1024,
        kv_blocks=None if on_gpu else 64,
        dtype="bfloat16" if on_gpu else "float32",
        devices=(int(options.device),) if on_gpu else (),
        sleeps=on_gpu,
    )

    async def measured() -> dict[str, Any]:
        replica, figures = Replica(config, 0, None, lambda index, sample: None), dict[str, float]()
        empty_bytes = used_bytes() if on_gpu else 0
        await replica.start()
        try:
            before = await replica.logprobs(SCORED)
            figures["kv_tokens"] = replica.usable_blocks * config.block_size
            for name, act in (
                ("sleep_s", replica.sleep),
                ("wake_weights_s", lambda: replica.wake("weights")),
                ("load_s", lambda: replica.update_weights(str(weights), 1)),
                ("wake_kv_s", lambda: replica.wake("kv_cache")),
            ):
                began = time.perf_counter()
                await act()
                figures[name] = time.perf_counter() - began
                if on_gpu:
                    figures[name.removesuffix("_s") + "_bytes"] = used_bytes() - empty_bytes
            after = await replica.logprobs(SCORED)
            figures["difference"] = float(abs(after - before).max())
        finally:
            await replica.shutdown()
        return figures

    return asyncio.run(measured())


def pull(options: Options) -> dict[str, Any]:
    return asyncio.run(pulled(options.model, on_gpu=options.device != "cpu"))


def resume(options: Options) -> dict[str, Any]:
    return dict(resumed(options.into.parent / "runs", options.fields))


MEASURES: dict[Name, Callable[[Options], dict[str, Any]]] = {
    "doctor": doctor,
    "quickstart": quickstart,
    "attention": attention,
    "families": families,
    "experts": experts,
    "sleep": sleep,
    "imports": imports,
    "rollouts": rollouts,
    "mismatch": mismatch,
    "rl": rl,
    "pull": pull,
    "resume": resume,
}


def main() -> None:
    options = parse(Options, sys.argv[1:], program="python -m bench.benches.gpu.measures", description=__doc__)
    options.into.write_text(json.dumps(MEASURES[options.name](options), indent=1))


if __name__ == "__main__":
    main()
