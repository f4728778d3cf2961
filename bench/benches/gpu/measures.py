"""What no other bench measures: a measure writes one JSON object.

doctor        which tool calls the jail can run here
quickstart    a short run of the quick start, its options as given
attention     trajectories side by side in one row against each alone: the same numbers, and how long
sleep         a replica gives its memory up and takes it back
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import ROOT
from engine.programs import rocstar

LENGTHS = (3000, 500, 1200, 4000, 700, 2600, 150, 2138)  # of the row on a GPU: 14,288 tokens; a tenth on the CPU
HEADS, KEY_HEADS, WIDTH = 16, 8, 128  # as Qwen3-1.7B


def doctor(_options: argparse.Namespace) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", rocstar.__name__, "doctor"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = (done.stdout + done.stderr).strip().splitlines() or ["it says nothing"]
    return {"said": lines[-1], "whole": lines, "exit_code": done.returncode}


def quickstart(options: argparse.Namespace) -> dict[str, Any]:
    runs, name = options.into.parent / "runs", f"quickstart-{int(time.time())}"
    words = [*options.words, f"runs={runs}", f"name={name}"]
    subprocess.run([sys.executable, "recipes/quickstart.py", *words], cwd=ROOT, check=True)
    summary = json.loads((runs / name / "summary.json").read_text())
    steps = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    names = ("learner/tokens_per_s", "tokens/per_s", "time/rollout_s", "time/learn_s", "time/sync_s", "time/step_s")
    middle = {name: statistics.median(row[name] for row in steps if name in row) for name in names}
    return {"summary": summary, "medians": middle}


def attention(options: argparse.Namespace) -> dict[str, Any]:
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
    module.is_causal, module.num_key_value_groups = True, HEADS // KEY_HEADS  # type: ignore[assignment]

    def run(inputs: list[Any], given: list[int]) -> Any:
        found, _ = packed_attention(module, *inputs, None, scaling=WIDTH**-0.5, **bounds(given, device))
        found.float().sum().backward()
        return found.detach()

    def row() -> Any:
        return run([tensor.clone().requires_grad_() for tensor in made], list(lengths))

    def alone() -> Any:
        found, begin = [], 0
        for length in lengths:
            own = [tensor[:, :, begin : begin + length].clone().requires_grad_() for tensor in made]
            found.append(run(own, [length]))
            begin += length
        return torch.cat(found, dim=1)

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
    return {"row_s": row_s, "alone_s": alone_s, "speedup": alone_s / row_s, "difference": difference, "tokens": total}


def sleep(options: argparse.Namespace) -> dict[str, Any]:
    """On the CPU a replica holds nothing of a shared device: there it only waits."""
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
        replica, found = Replica(config, 0, None, lambda index, sample: None), {}
        await replica.start()
        try:
            for name, act in (
                ("sleep_s", replica.sleep()),
                ("wake_weights_s", replica.wake("weights")),
                ("wake_kv_s", replica.wake("kv_cache")),
            ):
                began = time.perf_counter()
                await act
                found[name] = time.perf_counter() - began
        finally:
            await replica.shutdown()
        return found

    return asyncio.run(measured())


MEASURES = {"doctor": doctor, "quickstart": quickstart, "attention": attention, "sleep": sleep}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.benches.gpu.measures", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=MEASURES)
    parser.add_argument("words", nargs="*", help="of the quick start")
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or the number of a GPU")
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    options.into.write_text(json.dumps(MEASURES[options.name](options), indent=1))


if __name__ == "__main__":
    main()
