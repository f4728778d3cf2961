"""The parts of the bench of a GPU: a command for each, a smaller one for the rehearsal, and the figures of its row.

A part is a bench of its own in a process of its own, so that one that fails costs its row and nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measuring.metric import Kind, Metric, count, megabytes, microseconds, milliseconds, seconds, share
from bench.measuring.result import Result
from bench.placement.policies import NAMES, OURS
from engine import metric_names as metric

AGENT = "recipes/tiny/agent"
MIXTURE = "model=recipes/tiny/agent_moe"
SHORT, MIDDLE, LONG = 4096, 16384, 32768  # tokens of the learner's trajectories
RL = (
    *("algorithm=grpo", "prompts_per_step=16", "group_size=8", "rollout.max_turns=1", "rollout.deadline_s=600"),
    *("eval_every=20", "eval_problems=8", "learner.lora_rank=32", "learner.lr=1e-3", "learner.warmup_steps=0"),
)
RL_MOE = (*RL, "learner.replay_routing=true", "learner.lora_targets=q_proj,k_proj,v_proj,o_proj")
UNJUDGED = (
    "canary_tolerance=none",
    "learner.mismatch_tolerance=none",
)  # measured in bfloat16 on a GPU for the first time
SMALL = ("eval_problems=8", "prompts_per_step=4", "group_size=2")
RESUMED = ("steps=3", "checkpoint_every=1", "eval_every=3", *SMALL)
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
    "difference": count(
        "difference", "largest difference; for experts, the norm of the difference over that of the outputs", form=".1e"
    ),
    "loop_over_grouped": _given("loop / grouped", "time of a loop over the experts of a layer over grouped products"),
    "logprobs": count("from exact", "|learner - float32| of log-probabilities, mean", form=".1e"),
    "gradients": count("gradient, from exact", "norm of the difference over that of the gradient", form=".1e"),
    "logprobs_over_plain": _given("from exact / plain", "the same over that of plain transformers in bfloat16"),
    "gradients_over_plain": _given("gradient / plain", "the same over that of plain transformers in bfloat16"),
    "routing_differs": share("routes differ", "positions that the learner would send to other experts", form=".1f"),
    "mismatch_mean": count("mismatch", "|learner - sampler|, mean", form=".1e"),
    "mismatch_max": count("largest", "|learner - sampler|", form=".1e"),
    "canary_mean": count("canary", "|learner - replica| on the canary's prompts, mean", form=".1e"),
    "canary_max": count("canary, largest", "|learner - replica| on the canary's prompts", form=".1e"),
    "moved_bytes": megabytes("moved", "bytes of a version"),
    "over_copy": _given("/ copy", "an update over a copy in host memory", form=".1f"),
    "stall_s": seconds("stall", "of a request that an update meets", form=".3f"),
    "sleep_s": seconds("sleep", "a replica gives its memory up"),
    "wake_weights_s": seconds("wake weights", "it takes the memory of its weights back"),
    "wake_kv_s": seconds("wake KV", "it takes the memory of its KV cache back"),
    "sleep_bytes": megabytes("asleep", "memory of the GPU that a sleeping replica holds", form=",.0f"),
    "wake_kv_bytes": megabytes("awake", "memory of the GPU that it holds afterwards", form=",.0f"),
    "kv_tokens": count("KV tokens", "that its cache holds"),
    "stopped_s": seconds("stopped", "from Ctrl-C until no process of a run is left"),
    "resumed_s": seconds("resumed", "from a run's start until it has trained the step that was interrupted"),
    "replaced_s": seconds("replaced", "from a replica's death in a pull until another serves that version"),
    "node_token_s": microseconds("node, per token", "CPU of the node's own process"),
    "node_cpu": share("node", "CPU of the event loop, of a core"),
    "lag_max_s": milliseconds("lag", "longest stall of the event loop in a step; 0 if all were below 20 ms"),
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
    summary = measured["summary"]
    return {
        **_steps(measured["medians"]),
        "accuracy_initial": summary["accuracy_initial"],
        "accuracy_final": summary["accuracy_final"],
        "jailed": summary["tool_calls_jailed"] / max(1, summary["tool_calls"]),
    }


def _rl(measured: Measured) -> Figures:
    medians, curve = measured["medians"], measured["curve"]
    values = {
        **_steps(medians),
        "peak_bytes": medians[metric.LEARNER_PEAK_BYTES],
        "reward_first": curve[0],
        "reward_last": curve[-1],
    }
    return values | ({"mfu": medians[metric.LEARNER_MFU]} if metric.LEARNER_MFU in medians else {})


def _steps(medians: Mapping[str, float]) -> Figures:
    values = {
        "rollout_tgs": medians[metric.TOKENS_PER_S],
        "training_tgs": medians[metric.LEARNER_TOKENS_PER_S],
        "generation_s": medians[metric.TIME_ROLLOUT_S],
        "policy_training_s": medians[metric.TIME_LEARN_S],
        "refit_s": medians[metric.TIME_SYNC_S],
        "e2e_step_s": medians[metric.TIME_STEP_S],
        "node_cpu": medians[metric.HOST_LOOP_CPU_SHARE],
        "lag_max_s": medians[metric.HOST_LOOP_LAG_MAX_MS] / 1e3,
        "mismatch_mean": medians[metric.LEARNER_MISMATCH_FRESH_MEAN],
        "mismatch_max": medians[metric.LEARNER_MISMATCH_FRESH_MAX],
        "canary_mean": medians[metric.CANARY_MEAN_ABS],
        "canary_max": medians[metric.CANARY_MAX_ABS],
    }
    differs = metric.LEARNER_ROUTING_DIFFERS
    return values | ({"routing_differs": medians[differs]} if differs in medians else {})


def _families(measured: Measured) -> Figures:
    """Raises ValueError naming the families that failed."""
    if failed := measured["failed"]:
        raise ValueError("; ".join(f"{family}: {error}" for family, error in failed.items()))
    names = ("logprobs", "gradients", "logprobs_over_plain", "gradients_over_plain")
    return {name: measured[name] for name in names if name in measured}


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


def _named(*names: str, on_gpu: Sequence[str] = ()) -> Callable[[Path], Figures]:
    """Returns a reader of these figures. on_gpu: more of them, which a rehearsal on the CPU does not have."""

    def read(measured: Measured) -> Figures:
        return {name: measured[name] for name in [*names, *(name for name in on_gpu if name in measured)]}

    return _own(read)


def parts() -> list[Part]:
    """Returns all parts, first those that say whether the paths of a GPU work, then those that say how fast they are.

    Where two rehearsals are the same words, one of them is run.
    """
    return [
        Part(
            name="doctor",
            full=own("doctor"),
            rehearsal=own("doctor"),
            limit_s=60,
            read=_own(lambda measured: {"jail": float(measured["exit_code"] == 0)}),
        ),
        Part(name="imports", full=own("imports"), rehearsal=own("imports"), limit_s=120, read=_own(_imports)),
        Part(
            name="attention",
            full=own("attention", "device=cuda"),
            rehearsal=own("attention"),
            limit_s=60,
            read=_named("alone_over_row", "difference"),
        ),
        Part(
            name="families",
            full=own("families", "device=cuda"),
            rehearsal=own("families"),
            limit_s=120,
            read=_own(_families),
        ),
        _learner_part("learner", "qwen3-1.7b", MIDDLE, 0),
        Part(
            name="quickstart",
            full=own("quickstart", "devices=0", "replicas=1", "steps=12", "eval_every=12", *UNJUDGED),
            rehearsal=own("quickstart", "replicas=1", "steps=1", "eval_every=2", *SMALL, *UNJUDGED),
            limit_s=240,
            read=_own(_quickstart),
        ),
        Part(
            name="rl_1.7b_lora",
            full=own("rl", "shape=qwen3-1.7b", "devices=0", "replicas=1", "steps=20", "rollout.max_tokens=512", *RL),
            rehearsal=own("rl", "replicas=1", "steps=2", "rollout.max_tokens=64", *RL),
            limit_s=420,
            read=_own(_rl),
        ),
        Part(
            name="sleep",
            full=own("sleep", "device=0", f"checkpoint={AGENT}"),
            rehearsal=own("sleep", f"checkpoint={AGENT}"),
            limit_s=180,
            read=_named(
                *("sleep_s", "wake_weights_s", "wake_kv_s", "difference", "kv_tokens"),
                on_gpu=("sleep_bytes", "wake_kv_bytes"),
            ),
        ),
        Part(
            name="mismatch",
            full=bench("mismatch", "device=0", "pairs=bfloat16/bfloat16", "rounds=1"),
            rehearsal=bench("mismatch", "pairs=bfloat16/bfloat16", "rounds=1", "trajectories=8"),
            limit_s=150,
            read=_bench(_mismatch),
        ),
        *[_mismatch_part(fp32_head=fp32_head) for fp32_head in (False, True)],
        *[_quickstart_moe_part(replay=replay) for replay in (True, False)],
        Part(
            name="rl_moe_lora",
            full=own(
                *("rl", "shape=30b-a3b-4l", "devices=0", "replicas=1", "eager=true", "steps=20"),
                *("rollout.max_tokens=512", *RL_MOE),
            ),
            rehearsal=own("rl", "shape=small-moe", "replicas=1", "steps=2", "rollout.max_tokens=64", *RL_MOE),
            limit_s=420,
            read=_own(_rl),
        ),
        Part(
            name="experts",
            full=own("experts", "device=cuda"),
            rehearsal=own("experts"),
            limit_s=60,
            read=_named("loop_over_grouped", "difference"),
        ),
        _learner_part("learner", "30b-a3b-4l", MIDDLE, 0),
        _learner_part("learner", "30b-a3b-4l", MIDDLE, 0, checkpointing="selective"),
        *[_learner_part("learner", "14b-8l", LONG, 32, offload=offload) for offload in (False, True)],
        Part(
            name="rollouts_1.7b",
            full=own(
                *("rollouts", "shape=qwen3-1.7b", "only=load", "device=0", "rounds=1"),
                *("concurrent=256", "trajectories=1024"),
            ),
            rehearsal=own("rollouts", "only=load", "concurrent=16", "trajectories=16", "rounds=1"),
            limit_s=240,
            read=_bench(_rollouts),
        ),
        Part(
            name="resume",
            full=own("resume", "devices=0", "replicas=1", *RESUMED),
            rehearsal=own("resume", "replicas=1", *RESUMED),
            limit_s=240,
            read=_named("stopped_s", "resumed_s"),
        ),
        Part(
            name="beside",
            full=own("quickstart", "devices=0", "replicas=1", "sleep=false", "steps=12", "eval_every=12", *UNJUDGED),
            rehearsal=own("quickstart", "replicas=1", "steps=1", "eval_every=2", *SMALL, *UNJUDGED),
            limit_s=240,
            read=_own(_quickstart),
        ),
        *[_weights_part(way) for way in ("shm", "adapter")],
        Part(
            name="resume_tp2",
            full=own("resume", "devices=0,1", "learner_ranks=2", "replicas=1", "tensor_parallel=2", *RESUMED),
            rehearsal=own("resume", "replicas=1", *RESUMED),
            limit_s=300,
            read=_named("stopped_s", "resumed_s"),
            gpus=2,
        ),
        _weights_part("nccl", rehearsed="gloo", gpus=2),
        Part(
            name="pull",
            full=own("pull", "device=cuda", "shape=qwen3-1.7b"),
            rehearsal=own("pull"),
            limit_s=240,
            read=_own(lambda measured: {"refit_s": measured["update_s"], "replaced_s": measured["replaced_s"]}),
            gpus=2,
        ),
        *[_rollouts_part(concurrent) for concurrent in (256, 1024)],
        _learner_part("learner", "qwen3-1.7b", MIDDLE, 32),
        *[_learner_part("bare", "qwen3-1.7b", MIDDLE, rank) for rank in (0, 32)],
        _learner_part("learner", "qwen3-1.7b", MIDDLE, 0, flash_attention="FA3"),
        _learner_part("learner", "qwen3-1.7b", MIDDLE, 0, checkpointing="selective"),
        *[_learner_part("learner", "qwen3-1.7b", context, rank) for context in (SHORT, LONG) for rank in (0, 32)],
        *[_learner_part("learner", "qwen3-4b", context, rank) for context in (MIDDLE, LONG) for rank in (0, 32)],
        Part(
            name="placement",
            full=bench("fleet", "device=0", "rounds=3", "kinds=math8k"),
            rehearsal=bench("fleet", "quick=true", "groups=2", "policies=kv_aware,round_robin"),
            limit_s=300,
            read=_bench(_placement),
        ),
    ]


def _quickstart_moe_part(*, replay: bool) -> Part:
    """The quick start with the tiny mixture, whose routes the learner replays, or chooses itself and compares."""
    routes = f"learner.replay_routing={'true' if replay else 'measure'}"
    return Part(
        name="quickstart_moe" + "_replay" * replay,
        full=own(
            *("quickstart", MIXTURE, "devices=0", "replicas=1", "eager=true", "steps=12", "eval_every=12", routes),
            *UNJUDGED,
        ),
        rehearsal=own("quickstart", MIXTURE, "replicas=1", "steps=1", "eval_every=2", routes, *SMALL, *UNJUDGED),
        limit_s=240,
        read=_own(_quickstart),
    )


def _mismatch_part(*, fp32_head: bool) -> Part:
    cut = ("pairs=bfloat16/bfloat16", "rounds=1")
    head = f"fp32_head={str(fp32_head).lower()}"
    return Part(
        name="mismatch_1.7b" + "_fp32_head" * fp32_head,
        full=own("mismatch", "shape=qwen3-1.7b", "device=0", "trajectories=1024", *cut, head),
        rehearsal=own("mismatch", "trajectories=8", *cut, "fp32_head=true"),
        limit_s=180,
        read=_bench(_mismatch),
    )


def _weights_part(way: str, *, rehearsed: str | None = None, gpus: int = 1) -> Part:
    return Part(
        name=f"weights_{way}",
        full=bench("weights", "device=0", "sizes=600m", f"transports={way}", "rounds=3"),
        rehearsal=bench("weights", "sizes=tiny", f"transports={rehearsed or way}", "rounds=1"),
        limit_s=180,
        read=_bench(_weights),
        gpus=gpus,
    )


def _rollouts_part(concurrent: int) -> Part:
    given = ("only=load", f"checkpoint={AGENT}")
    size = (f"concurrent={concurrent}", f"trajectories={4 * concurrent}")
    return Part(
        name=f"rollouts_{concurrent}",
        full=bench("rollout", *given, *size, "device=0", "rounds=3"),
        rehearsal=bench("rollout", *given, "concurrent=16", "trajectories=16", "rounds=1"),
        limit_s=240,
        read=_bench(_rollouts),
    )


def _learner_part(
    who: str,
    model: str,
    context: int,
    rank: int,
    *,
    checkpointing: str = "full",
    offload: bool = False,
    flash_attention: str = "FA2",
) -> Part:
    """who: "learner", or the "bare" model, which has the memory to itself too."""
    cut = (f"context={context}", f"trajectories={max(1, 65536 // context)}")
    kept = (f"checkpointing={checkpointing}", *(("offload=true",) if offload else ()))
    kernels = () if flash_attention == "FA2" else (f"flash_attention={flash_attention}",)
    named = ["" if checkpointing == "full" else f"_{checkpointing}", *(f"_{flash_attention.lower()}" for _ in kernels)]
    named += ["_offload"] * offload
    return Part(
        name=f"{who}_{model}_{context // 1024}k_{'lora' if rank else 'full'}{''.join(named)}",
        full=bench(
            *("learner", f"only={who}", f"model={model}", "device=cuda", *cut, f"lora={rank}", *kept, *kernels),
            "rounds=3",
        ),
        rehearsal=bench(
            *("learner", f"only={who}", f"model={'tiny-moe' if 'a3b' in model else 'tiny'}", "context=64"),
            *("trajectories=4", f"lora={rank // 4}", *kept, "rounds=1"),
        ),
        limit_s=200,
        read=_bench(
            _learner if who == "learner" else lambda result: {"training_tgs": result.figures["bare"]["tokens_per_s"]}
        ),
    )
