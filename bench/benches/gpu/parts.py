"""The parts of the bench of a GPU: a command for each, a smaller one for the rehearsal, and the figures of its row.

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

from bench.measuring.metric import Kind, Metric, count, megabytes, microseconds, seconds, share
from bench.measuring.result import Result
from bench.placement.policies import NAMES, OURS
from engine import metric_names as metric

AGENT = "recipes/tiny/agent"
MODELS, CONTEXTS, RANKS = ("qwen3-1.7b", "qwen3-4b"), (4096, 16384, 32768), (0, 32)
RL = (
    *("algorithm=grpo", "prompts_per_step=16", "group_size=8", "rollout.max_turns=1", "rollout.deadline_s=600"),
    *("eval_every=20", "eval_problems=8", "learner.lora_rank=32", "learner.lr=1e-3", "learner.warmup_steps=0"),
)
RIVALS = [name for name in NAMES if name != OURS]

Figures = dict[str, float]
Measured = Mapping[str, Any]  # the output of `bench.benches.gpu.measures`


def _rate(title: str) -> Metric:
    return Metric(title=title, doc="tokens per GPU and second", kind=Kind.RATE, form=",.0f")


def _given(title: str, doc: str, form: str = ".2f") -> Metric:
    """Returns a ratio of a part's own rounds, which is shown even though a part has one round here."""
    return Metric(title=title, doc=doc, kind=Kind.COUNT, form=form)


METRICS = {
    "jail": count("jail", "1 where the sandbox's doctor finds nothing wrong"),
    "rollout_tgs": _rate("rollout_tgs"),
    "training_tgs": _rate("training_tgs"),
    "generation_s": seconds("generation", "of a step"),
    "policy_training_s": seconds("policy training", "of a step", form=".3f"),
    "refit_s": seconds("refit", "of a step, or of an update", form=".3f"),
    "e2e_step_s": seconds("e2e step", ""),
    "accuracy_initial": count("accuracy before", "", form=".3f"),
    "accuracy_final": count("accuracy after", "", form=".3f"),
    "jailed": share("jailed", "share of the tool calls", form=".0f"),
    "of_bare": _given("of bare", "tokens/s over the bare model's or the bare engine's"),
    "mfu": share("MFU", "share of the device's peak"),
    "peak_bytes": megabytes("peak", "most memory", form=",.0f"),
    "alone_over_row": _given("alone / row", "time of trajectories one by one over that in one row"),
    "difference": count("difference", "largest, of the two", form=".1e"),
    "mismatch_mean": count("mismatch", "|learner - sampler|, mean", form=".1e"),
    "mismatch_max": count("largest", "|learner - sampler|", form=".1e"),
    "moved_bytes": megabytes("moved", "bytes of a version"),
    "over_copy": _given("/ copy", "an update over a copy in host memory", form=".1f"),
    "stall_s": seconds("stall", "of a request that an update meets", form=".3f"),
    "sleep_s": seconds("sleep", "a replica gives its memory up"),
    "wake_weights_s": seconds("wake weights", "it takes the memory of its weights back"),
    "wake_kv_s": seconds("wake KV", "it takes the memory of its KV cache back"),
    "replaced_s": seconds("replaced", "from a replica's death in a pull until another serves that version"),
    "node_token_s": microseconds("node, per token", "CPU of the node's own process"),
    "node_cpu": share("node", "CPU of the event loop, of a core"),
    "modules": count("imported", "modules that a GPU engine and learner need"),
    "reward_first": count("reward, first", "share of even tokens in the first step", form=".3f"),
    "reward_last": count("reward, last", "the same in the last step", form=".3f"),
    **{f"ratio_{name}": _given(name, f"makespan over that of {OURS}") for name in RIVALS},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """full, rehearsal: arguments of `python`, FILE standing for the result's path. limit_s: time of the full one.

    read: makes the figures of its row from that file. gpus: how many it needs.
    """

    name: str
    full: tuple[str, ...]
    rehearsal: tuple[str, ...]
    limit_s: float
    read: Callable[[Path], Figures]
    gpus: int = 1

    def command(self, file: Path, *, rehearse: bool) -> list[str]:
        arguments = self.rehearsal if rehearse else self.full
        return [sys.executable, *(word.replace("FILE", str(file)) for word in arguments)]


def figures(part: Part, file: Path) -> Figures:
    """Raises OSError, KeyError or ValueError for a result that does not hold them."""
    return part.read(file)


def bench(*arguments: str) -> tuple[str, ...]:
    return ("-m", "bench", *arguments, "json=FILE")


def own(*arguments: str) -> tuple[str, ...]:
    return ("-m", "bench.benches.gpu.measures", *arguments, "into=FILE")


def _own(read: Callable[[Measured], Figures]) -> Callable[[Path], Figures]:
    return lambda file: read(json.loads(file.read_text()))


def _bench(read: Callable[[Result], Figures]) -> Callable[[Path], Figures]:
    return lambda file: read(Result.read(file))


def _quickstart(measured: Measured) -> Figures:
    medians, summary = measured["medians"], measured["summary"]
    return {
        "rollout_tgs": medians[metric.TOKENS_PER_S],
        "training_tgs": medians[metric.LEARNER_TOKENS_PER_S],
        "generation_s": medians[metric.TIME_ROLLOUT_S],
        "policy_training_s": medians[metric.TIME_LEARN_S],
        "refit_s": medians[metric.TIME_SYNC_S],
        "e2e_step_s": medians[metric.TIME_STEP_S],
        "accuracy_initial": summary["accuracy_initial"],
        "accuracy_final": summary["accuracy_final"],
        "jailed": summary["tool_calls_jailed"] / max(1, summary["tool_calls"]),
        "node_cpu": medians[metric.HOST_LOOP_CPU_SHARE],
    }


def _rl(measured: Measured) -> Figures:
    medians, curve = measured["medians"], measured["curve"]
    values = {
        "rollout_tgs": medians[metric.TOKENS_PER_S],
        "training_tgs": medians[metric.LEARNER_TOKENS_PER_S],
        "generation_s": medians[metric.TIME_ROLLOUT_S],
        "policy_training_s": medians[metric.TIME_LEARN_S],
        "refit_s": medians[metric.TIME_SYNC_S],
        "e2e_step_s": medians[metric.TIME_STEP_S],
        "node_cpu": medians[metric.HOST_LOOP_CPU_SHARE],
        "peak_bytes": medians[metric.LEARNER_PEAK_BYTES],
        "mismatch_mean": medians[metric.LEARNER_MISMATCH_FRESH_MEAN],
        "reward_first": curve[0],
        "reward_last": curve[-1],
    }
    return values | ({"mfu": medians[metric.LEARNER_MFU]} if metric.LEARNER_MFU in medians else {})


def _imports(measured: Measured) -> Figures:
    """Raises ValueError naming the modules that cannot be imported."""
    if failed := measured["failed"]:
        raise ValueError("; ".join(f"{module}: {error}" for module, error in failed.items()))
    return {"modules": measured["modules"]}


def _learner(result: Result) -> Figures:
    learner = result.figures["learner"]
    values = {
        "training_tgs": learner["tokens_per_s"],
        "policy_training_s": sum(learner[part] for part in ("plan_s", "passes_s", "optimizer_s", "publish_s")),
        "peak_bytes": learner["peak_bytes"],
    }
    if "mfu" in learner:
        values["mfu"] = learner["mfu"]
    return values


def _mismatch(result: Result) -> Figures:
    [pair] = result.figures.values()
    return {"mismatch_mean": pair["mean"], "mismatch_max": pair["max"]}


def _weights(result: Result) -> Figures:
    [case] = result.figures.values()
    return {"refit_s": case["total_s"], **{name: case[name] for name in ("moved_bytes", "over_copy", "stall_s")}}


def _rollouts(result: Result) -> Figures:
    jailed = result.figures["jailed"]
    return {
        "rollout_tgs": jailed["tokens_per_s"],
        "of_bare": jailed["of_bare"],
        "node_token_s": jailed["token_s"],
    }


def _placement(result: Result) -> Figures:
    return {f"ratio_{name}": result.figures[name]["ratio_math8k"] for name in RIVALS if name in result.figures}


def parts() -> list[Part]:
    every = [
        Part(
            name="doctor",
            full=own("doctor"),
            rehearsal=own("doctor"),
            limit_s=60,
            read=_own(lambda measured: {"jail": float(measured["exit_code"] == 0)}),
        ),
        Part(
            name="imports",
            full=own("imports"),
            rehearsal=own("imports"),
            limit_s=120,
            read=_own(_imports),
        ),
        Part(
            name="quickstart",
            full=own("quickstart", "devices=0", "replicas=1", "steps=12", "eval_every=12"),
            rehearsal=own("quickstart", "steps=1", "eval_every=2", "eval_problems=8"),
            limit_s=240,
            read=_own(_quickstart),
        ),
        Part(
            name="attention",
            full=own("attention", "device=cuda"),
            rehearsal=own("attention"),
            limit_s=60,
            read=_own(lambda measured: {name: measured[name] for name in ("alone_over_row", "difference")}),
        ),
        Part(
            name="sleep",
            full=own("sleep", "device=0", f"checkpoint={AGENT}"),
            rehearsal=own("sleep", f"checkpoint={AGENT}"),
            limit_s=180,
            read=_own(
                lambda measured: {
                    name: measured[name] for name in ("sleep_s", "wake_weights_s", "wake_kv_s", "difference")
                }
            ),
        ),
    ]
    every += [
        Part(
            name=f"mismatch_{sampler}",
            full=bench("mismatch", "device=0", f"pairs={sampler}/bfloat16", "rounds=1"),
            rehearsal=bench("mismatch", "pairs=float32/float32", "rounds=1", "trajectories=8"),
            limit_s=150,
            read=_bench(_mismatch),
        )
        for sampler in ("bfloat16", "float32")
    ]
    every += [
        Part(
            name=f"weights_{way}",
            full=bench("weights", "device=0", "sizes=600m", f"transports={way}", "rounds=3"),
            rehearsal=bench("weights", "sizes=tiny", f"transports={way}", "rounds=1"),
            limit_s=180,
            read=_bench(_weights),
        )
        for way in ("shm", "adapter")
    ]
    for concurrent in (256, 1024):
        given = ("only=load", f"checkpoint={AGENT}")
        size = (f"concurrent={concurrent}", f"trajectories={4 * concurrent}")
        every.append(
            Part(
                name=f"rollouts_{concurrent}",
                full=bench("rollout", *given, *size, "device=0", "rounds=3"),
                rehearsal=bench("rollout", *given, "concurrent=16", "trajectories=32", "rounds=1"),
                limit_s=240,
                read=_bench(_rollouts),
            )
        )
    every += [
        Part(
            name="rollouts_1.7b",
            full=own(
                "rollouts",
                "shape=qwen3-1.7b",
                "only=load",
                "device=0",
                "concurrent=512",
                "trajectories=2048",
                "rounds=1",
            ),
            rehearsal=own("rollouts", "only=load", "concurrent=16", "trajectories=32", "rounds=1"),
            limit_s=240,
            read=_bench(_rollouts),
        ),
        Part(
            name="rl_1.7b_lora",
            full=own("rl", "shape=qwen3-1.7b", "devices=0", "replicas=1", "steps=20", "rollout.max_tokens=512", *RL),
            rehearsal=own("rl", "replicas=1", "steps=2", "rollout.max_tokens=64", *RL),
            limit_s=420,
            read=_own(_rl),
        ),
        Part(
            name="weights_nccl",
            full=bench("weights", "device=0", "sizes=600m", "transports=nccl", "rounds=3"),
            rehearsal=bench("weights", "sizes=tiny", "transports=gloo", "rounds=1"),
            limit_s=180,
            read=_bench(_weights),
            gpus=2,
        ),
        Part(
            name="pull",
            full=own("pull", "device=cuda", "shape=qwen3-1.7b"),
            rehearsal=own("pull"),
            limit_s=240,
            read=_own(lambda measured: {"refit_s": measured["update_s"], "replaced_s": measured["replaced_s"]}),
            gpus=2,
        ),
    ]
    every.append(
        Part(
            name="placement",
            full=bench("fleet", "device=0", "rounds=3", "kinds=math8k"),
            rehearsal=bench("fleet", "quick=true", "groups=2", "policies=kv_aware,round_robin"),
            limit_s=300,
            read=_bench(_placement),
        )
    )
    for model, context, rank in product(MODELS, CONTEXTS, RANKS):
        every.append(_learner_part("learner", model, context, rank))
    every += [_learner_part("bare", MODELS[0], 16384, rank) for rank in RANKS]
    every.append(_learner_part("learner", MODELS[0], 16384, 0, checkpointing="selective"))
    return every


def _learner_part(who: str, model: str, context: int, rank: int, *, checkpointing: str = "full") -> Part:
    """who: "learner", or the "bare" model, which has the memory to itself too."""
    cut = (f"context={context}", f"trajectories={max(1, 65536 // context)}", f"checkpointing={checkpointing}")
    named = "" if checkpointing == "full" else f"_{checkpointing}"
    return Part(
        name=f"{who}_{model}_{context // 1024}k_{'lora' if rank else 'full'}{named}",
        full=bench("learner", f"only={who}", f"model={model}", "device=cuda", *cut, f"lora={rank}", "rounds=3"),
        rehearsal=bench(
            "learner", f"only={who}", "context=64", "trajectories=4", f"lora={rank // 4}", cut[-1], "rounds=1"
        ),
        limit_s=200,
        read=_bench(
            _learner if who == "learner" else lambda result: {"training_tgs": result.figures["bare"]["tokens_per_s"]}
        ),
    )
