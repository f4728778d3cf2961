"""What the kit measures on a GPU: a command for each part, a smaller one for the rehearsal, and the figures of its row.

A part is a bench of its own in a process of its own, so that one that fails costs its row and nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

PYTHON = sys.executable
AGENT = "recipes/tiny/agent"
Figures = dict[str, float | str]
Result = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """full, rehearsal: words after `python`, FILE standing for where the result goes. limit_s: of the full one.

    read: from that file to the row's figures, by the column or as remarks.
    """

    name: str
    full: tuple[str, ...]
    rehearsal: tuple[str, ...]
    limit_s: float
    read: Callable[[Result], Figures]

    def command(self, file: Path, *, rehearse: bool) -> list[str]:
        words = self.rehearsal if rehearse else self.full
        return [PYTHON, *(str(file) if word == "FILE" else word for word in words)]


def bench(*words: str) -> tuple[str, ...]:
    return ("-m", "bench", *words, "--json", "FILE")


def own(*words: str) -> tuple[str, ...]:
    return ("-m", "bench.benches.gpu.measures", *words, "--into", "FILE")


def metric(result: Result, name: str) -> float:
    return float(result["metrics"][name])


def quickstart(result: Result) -> Figures:
    medians, summary = result["medians"], result["summary"]
    accuracy = f"accuracy {summary['accuracy_initial']:.3f} to {summary['accuracy_final']:.3f}"
    return {
        "rollout_tgs": medians["tokens/per_s"],
        "training_tgs": medians["learner/tokens_per_s"],
        "generation s": medians["time/rollout_s"],
        "policy training s": medians["time/learn_s"],
        "refit s": medians["time/sync_s"],
        "e2e step s": medians["time/step_s"],
        "remark": f"{accuracy}, {summary['tool_calls_jailed']} of {summary['tool_calls']} calls jailed",
    }


def learner(result: Result) -> Figures:
    metrics, share = result["metrics"], result["metrics"]["bare_fraction"]
    bare = "no memory for bare" if share is None else f"{share:.2f} of bare"
    found: Figures = {
        "training_tgs": metrics["tokens_per_s"]["learner"],
        "policy training s": sum(metrics["part_s"].values()),
        "remark": f"{bare}, peak {metrics['peak_bytes'] / 1e9:.1f} GB",
    }
    return found | ({"MFU": metrics["mfu"]} if metrics["mfu"] else {})


def attention(result: Result) -> Figures:
    return {"remark": f"{result['speedup']:.2f} x alone, largest difference {result['difference']:.1e}"}


def mismatch(result: Result) -> Figures:
    found = result["metrics"]
    pairs = [name.removeprefix("mismatch_mean_") for name in found if name.startswith("mismatch_mean_")]
    shown = [f"{pair} {metric(result, f'mismatch_mean_{pair}'):.1e}" for pair in pairs]
    largest = max(value for name, value in found.items() if name.startswith("mismatch_max_"))
    return {"remark": f"mean {', '.join(shown)}, largest {largest:.1e}"}


def weights(result: Result) -> Figures:
    metrics = result["metrics"]
    name = next(name.removeprefix("total_s_") for name in metrics if name.startswith("total_s_"))
    copies = f"{metrics[f'copy_floor_ratio_{name}']:.1f} x a copy in host memory"
    return {
        "refit s": metrics[f"total_s_{name}"],
        "remark": f"{metrics[f'moved_bytes_{name}'] / 1e6:.1f} MB, {copies}, stall {metrics[f'stall_s_{name}']:.3f} s",
    }


def sleep(result: Result) -> Figures:
    return {"remark": ", ".join(f"{name} {result[name]:.2f} s" for name in ("sleep_s", "wake_weights_s", "wake_kv_s"))}


def rollouts(result: Result) -> Figures:
    metrics = result["metrics"]
    share = metrics["load"]["raw_fraction_jailed"] if "load" in metrics else metrics["raw_fraction_jailed"]
    return {"remark": f"{share:.2f} of bare vLLM with jailed tools"}


def placement(result: Result) -> Figures:
    ratios = {name.removeprefix("makespan_ratio_"): value for name, value in result["metrics"].items()}
    shown = [f"{name} {value:.2f}" for name, value in ratios.items() if isinstance(value, float) and name in RIVALS]
    return {"remark": "theirs / ours: " + ", ".join(shown)}


def doctor(result: Result) -> Figures:
    return {"remark": str(result["said"])}


RIVALS = ("static", "round_robin", "cap12", "budget", "aimd", "thunder")
MODELS, CONTEXTS, RANKS = ("qwen3-1.7b", "qwen3-4b"), (4096, 16384, 32768), (0, 32)


def parts() -> list[Part]:
    found = [
        Part(
            name="doctor",
            full=own("doctor"),
            rehearsal=own("doctor"),
            limit_s=60,
            read=doctor,
        ),
        Part(
            name="quickstart",
            full=own("quickstart", "devices=0", "replicas=1", "steps=12", "eval_every=12"),
            rehearsal=own("quickstart", "steps=1", "eval_every=2", "eval_problems=8"),
            limit_s=240,
            read=quickstart,
        ),
        Part(
            name="attention",
            full=own("attention", "--device", "cuda"),
            rehearsal=own("attention"),
            limit_s=60,
            read=attention,
        ),
        Part(
            name="sleep",
            full=own("sleep", "--device", "0", "--checkpoint", AGENT),
            rehearsal=own("sleep", "--checkpoint", AGENT),
            limit_s=180,
            read=sleep,
        ),
    ]
    for sampler in ("bfloat16", "float32"):
        found.append(
            Part(
                name=f"mismatch_{sampler}",
                full=bench("mismatch", "--device", "0", "--pairs", f"{sampler}/bfloat16", "--trajectories", "256"),
                rehearsal=bench("mismatch", "--pairs", "float32/float32", "--trajectories", "8"),
                limit_s=150,
                read=mismatch,
            )
        )
    for way in ("shm", "adapter"):
        found.append(
            Part(
                name=f"weights_{way}",
                full=bench("weights", "--device", "0", "--sizes", "600m", "--transports", way, "--rounds", "3"),
                rehearsal=bench("weights", "--sizes", "tiny", "--transports", way, "--rounds", "1"),
                limit_s=180,
                read=weights,
            )
        )
    for concurrent in (256, 1024):
        given = ("--only", "load", "--checkpoint", AGENT)
        size = ("--concurrent", str(concurrent), "--trajectories", str(4 * concurrent))
        found.append(
            Part(
                name=f"rollouts_{concurrent}",
                full=bench("rollout", *given, *size, "--device", "0", "--rounds", "3"),
                rehearsal=bench("rollout", *given, "--concurrent", "16", "--trajectories", "32", "--rounds", "1"),
                limit_s=240,
                read=rollouts,
            )
        )
    found.append(
        Part(
            name="placement",
            full=bench("fleet", "--device", "0", "--rounds", "3", "--kinds", "math8k"),
            rehearsal=bench("fleet", "--quick", "--groups", "2", "--policies", "kv_aware,round_robin"),
            limit_s=300,
            read=placement,
        )
    )
    for model, context, rank in product(MODELS, CONTEXTS, RANKS):
        cut = ("--context", str(context), "--trajectories", str(max(1, 65536 // context)), "--checkpointing")
        found.append(
            Part(
                name=f"learner_{model}_{context // 1024}k_{'lora' if rank else 'full'}",
                full=bench("learner", "--model", model, "--device", "cuda", *cut, "--lora", str(rank), "--rounds", "3"),
                rehearsal=bench(
                    "learner", "--context", "64", "--trajectories", "4", "--lora", str(rank // 4), "--rounds", "1"
                ),
                limit_s=200,
                read=learner,
            )
        )
    return found


def figures(part: Part, file: Path) -> Figures:
    """Of a part that has ended. Raises OSError, KeyError or ValueError for a result that does not say them."""
    return part.read(json.loads(file.read_text()))
