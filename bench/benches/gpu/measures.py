"""What no other bench measures on a GPU; each writes one JSON object into a file.

    python -m bench.benches.gpu.measures NAME into=FILE [options]

doctor        which tool calls the jail can run here
quickstart    a short run of the quick start, its options as given
attention     trajectories side by side in one row against each alone: the same numbers, and how long
sleep         a replica gives its memory up and takes it back
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from bench import ROOT
from engine import metric_names as metric
from engine.console.options import Positional, Rest, parse
from engine.programs import rocstar
from recipes.tiny.task import SHIPPED

LENGTHS = (3000, 500, 1200, 4000, 700, 2600, 150, 2138)  # a row on a GPU has 14,288 tokens, a tenth on the CPU
HEADS, KEY_HEADS, WIDTH = 16, 8, 128  # as Qwen3-1.7B


@dataclass(frozen=True, kw_only=True)
class Options:
    name: Annotated[Literal["doctor", "quickstart", "attention", "sleep"], Positional("what is measured")]
    into: Annotated[Path, "file that gets the JSON object"]
    device: Annotated[str, "cpu, cuda, or the number of a GPU"] = "cpu"
    checkpoint: Annotated[Path, "the model of sleep"] = SHIPPED
    fields: Annotated[tuple[str, ...], Rest("options of the quick start")] = ()


def doctor(_options: Options) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", rocstar.__name__, "doctor"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {"output": done.stdout + done.stderr, "exit_code": done.returncode}


def quickstart(options: Options) -> dict[str, Any]:
    runs, name = options.into.parent / "runs", f"quickstart-{int(time.time())}"
    arguments = [*options.fields, f"runs={runs}", f"name={name}"]
    subprocess.run([sys.executable, "recipes/quickstart.py", *arguments], cwd=ROOT, check=True)
    summary = json.loads((runs / name / "summary.json").read_text())
    steps = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    names = (
        metric.LEARNER_TOKENS_PER_S,
        metric.TOKENS_PER_S,
        metric.TIME_ROLLOUT_S,
        metric.TIME_LEARN_S,
        metric.TIME_SYNC_S,
        metric.TIME_STEP_S,
    )
    middle = {name: statistics.median(row[name] for row in steps if name in row) for name in names}
    return {"summary": summary, "medians": middle}


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


def sleep(options: Options) -> dict[str, Any]:
    """Measures sleep and wake. On the CPU a replica holds nothing of a shared device, and only waits."""
    from engine.replica.config import ReplicaConfig, prepare_environment

    prepare_environment()
    from engine.replica.replica import Replica

    on_gpu = options.device != "cpu"
    config = ReplicaConfig(
        checkpoint=str(options.checkpoint),
        max_model_len=1024,
        kv_blocks=None if on_gpu else 64,
        dtype="bfloat16" if on_gpu else "float32",
        devices=(int(options.device),) if on_gpu else (),
        sleeps=on_gpu,
    )

    async def measured() -> dict[str, Any]:
        replica, seconds = Replica(config, 0, None, lambda index, sample: None), {}
        await replica.start()
        try:
            for name, act in (
                ("sleep_s", replica.sleep()),
                ("wake_weights_s", replica.wake("weights")),
                ("wake_kv_s", replica.wake("kv_cache")),
            ):
                began = time.perf_counter()
                await act
                seconds[name] = time.perf_counter() - began
        finally:
            await replica.shutdown()
        return seconds

    return asyncio.run(measured())


MEASURES = {"doctor": doctor, "quickstart": quickstart, "attention": attention, "sleep": sleep}


def main() -> None:
    options = parse(Options, sys.argv[1:], program="python -m bench.benches.gpu.measures", description=__doc__)
    options.into.write_text(json.dumps(MEASURES[options.name](options), indent=1))


if __name__ == "__main__":
    main()
