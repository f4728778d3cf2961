"""What does a rollout cost on top of its engines? Ours against the same engines generating the same tokens alone.

    rocstar bench rollout [rounds=5] [only=load,scale] [checkpoint=FOLDER] [profile=FILE]

load    trajectories of the quick start's task, 256 at a time on two vLLM replicas and two cores, in interleaved rounds:
        bare       the engines alone, which is the floor: no fleet, chat, parser or tools
        scripted   rollouts whose tools answer at once
        jailed     rollouts with jailed tools
        sleeping   rollouts whose tools sleep 0.3 s
        All modes generate the same tokens but for what rounding in other batches changes: where a mode differs from
        bare by more than 1 % of the tokens, or asks for more than 1 % of unknown answers, the bench fails.
scale   4,096 trajectories on scripted replicas that step like engines, and 16,384 more that wait: lag of the event
        loop, and memory. The bench fails where a task or a turn is left over.

Without a checkpoint the policy is trained once by recipes/quickstart.py, which takes two minutes.
"""

from __future__ import annotations

import cProfile
import gc
import random
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import uvloop

from bench import ROOT
from bench.benches.rollout.load import Measured, Recorder, Repeater, Schedule, bare, rolled
from bench.benches.rollout.scale import QUEUED, RUNNING, scale
from bench.benches.rollout.scale import REPLICAS as MANY
from bench.measuring.bench import Bench, BenchFailed, Keep
from bench.measuring.metric import Kind, count, megabytes, microseconds, milliseconds, rate, ratio
from bench.measuring.processes import child
from bench.measuring.terminal import say
from engine.balancing.kv_aware import KvAware
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.ports import ToolRunner
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.replica.port import KvSample
from engine.replica.replica import Replica
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.run.workspace import workspace
from engine.telemetry.timeline import Timeline
from engine.tools.python_tool import PythonTool
from recipes.tiny.task import MAX_TOKENS, MAX_TOOL_CALLS, prompts
from sandbox import TIERS, Limits, Sandbox, SandboxConfig
from sandbox.require import Rule, at_least, require_fields

TRAINED = Path("runs/bench/rollout")
SAMPLES = 16  # per prompt, as in the quick start
REPLICAS = 2
SLEEP_S = 0.3
SEED = 0
OFF = 0.01  # share of tokens or tool calls by which modes may differ

Round = Mapping[str, Measured]  # mode -> its measurement


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "runs of each mode"] = 5
    only: Annotated[tuple[Literal["load", "scale"], ...], "parts of the bench"] = ("load", "scale")
    trajectories: Annotated[int, f"trajectories of a mode and round, a multiple of {SAMPLES}"] = 1024
    concurrent: Annotated[int, "trajectories at a time"] = 256
    queued: Annotated[int, f"trajectories beyond the {MANY * RUNNING} that run in scale"] = QUEUED
    checkpoint: Annotated[Path | None, "folder of a trained policy"] = None
    device: Annotated[int | None, "a GPU for one replica instead of the CPU for two"] = None
    profile: Annotated[Path | None, "file that gets a cProfile of one scripted run"] = None

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds", "concurrent")
        require_fields(
            self, Rule(f"a multiple of {SAMPLES}", lambda value: value % SAMPLES == 0), "trajectories", "queued"
        )
        require_fields(self, at_least(SAMPLES), "trajectories")
        if self.checkpoint is not None and not (self.checkpoint / "config.json").is_file():
            raise ValueError(f"checkpoint must be a folder with config.json, got {str(self.checkpoint)!r}")


METRICS = {
    "tokens_per_s": rate("tokens/s", "sampled"),
    "of_bare": ratio("of bare", "tokens/s over those of the bare engines in the same round", form=".3f"),
    "of_bare_cpu": ratio("of bare, CPU", "the same in tokens per CPU second of all processes", form=".3f"),
    "token_s": microseconds("per token", "CPU of the node's own process"),
    "turn_s": microseconds("per turn", "CPU of the node's own process", form=",.0f"),
    "trajectory_s": microseconds("per trajectory", "CPU of the node's own process", form=",.0f"),
    "call_mean_s": milliseconds("a call", "latency of a tool call, mean", form=".0f"),
    "call_p99_s": milliseconds("a call, p99", "latency of a tool call", form=".0f"),
    "lag_p99_s": milliseconds("lag, p99", "by which the event loop is late", form=".1f"),
    "lag_max_s": milliseconds("largest lag", "by which the event loop is late", form=".0f"),
    "lag_cpu_p99_s": milliseconds("lag in CPU, p99", "the same in CPU time", form=".1f", kind=Kind.CPU),
    "cpu_per_token_s": microseconds("CPU per token", "of this process", form=".1f"),
    # The first round takes this memory from the system; later ones find it free.
    "trajectory_bytes": megabytes("a trajectory", "memory when all wait", form=".3f", summary="largest"),
    "trajectory_peak_bytes": megabytes("at most", "memory of one at the peak", form=".3f", summary="largest"),
    "trajectories": count("trajectories", "that ended"),
}


def measure(options: Options, keep: Keep) -> None:
    prepare_environment()
    with workspace():
        checkpoint = options.checkpoint or trained()
        if "scale" in options.only:
            for number in range(options.rounds):
                say(f"round {number + 1}: {MANY * RUNNING:,} trajectories running, {options.queued:,} waiting")
                keep({"scale": uvloop.run(scale(checkpoint, options.queued))})
        if "load" in options.only:
            uvloop.run(Load(options, checkpoint, keep).run())


def trained() -> Path:
    """Returns the checkpoint of a short run of the quick start, which is made if it is not there."""
    checkpoint = TRAINED / "checkpoint"
    if not (checkpoint / "config.json").is_file():
        say(f"a policy is trained: {TRAINED}")
        fields = [f"runs={TRAINED.parent}", f"name={TRAINED.name}", "steps=16", "eval_every=16"]
        with child([sys.executable, str(ROOT / "recipes/quickstart.py"), *fields]) as process:
            if code := process.wait():
                raise BenchFailed(f"the quick start ended with exit code {code}; see above")
    return checkpoint


class Load:
    """Two replicas, and one Rollouts per kind of tool on one fleet."""

    def __init__(self, options: Options, checkpoint: Path, keep: Keep) -> None:
        self.options, self.checkpoint, self.keep = options, checkpoint, keep
        self.prompts = list(islice(prompts("train", SEED), options.trajectories // SAMPLES))
        self.replicas: list[Replica] = []
        self.schedules: list[Schedule] = []

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            chat = ChatTemplate.load(self.checkpoint)
            limits = Limits(wall_s=2.0, cpu_s=2.0, memory_bytes=512 << 20)
            box = await stack.enter_async_context(Sandbox(SandboxConfig(slots=8, limits=limits, tiers=TIERS[:1])))
            recorder = Recorder(box)
            timeline = Timeline()
            balancer = KvAware(MAX_TOKENS, moves=0)  # a moved request goes on under another seed
            replicas = REPLICAS if self.options.device is None else 1
            fleet = Fleet(FleetConfig(replicas=replicas), self._replica, balancer, timeline)
            await stack.enter_async_context(fleet)
            budget = RolloutConfig(max_tokens=MAX_TOKENS, max_turns=MAX_TOOL_CALLS + 1)
            at_once, late = Repeater(recorder.answers), Repeater(recorder.answers, SLEEP_S)
            repeaters = {"scripted": at_once, "sleeping": late}
            runners: dict[str, ToolRunner] = {"record": recorder, "jailed": box, **repeaters}
            rollouts = {
                name: Rollouts(budget, chat, fleet, [PythonTool(runner)], timeline, SEED)
                for name, runner in runners.items()
            }
            gc.freeze()  # as the quick start does: what vLLM and torch brought along is not collected again and again
            gc.set_threshold(50_000, 20, 1_000_000)
            say("what all modes repeat is recorded")
            recorded = await self._rolled(rollouts.pop("record"))
            self.schedules = [Schedule.of(trajectory, SEED) for trajectory in recorded.trajectories]
            modes: dict[str, Callable[[], Awaitable[Measured]]] = {"bare": self._bare}
            modes |= {name: partial(self._rolled, one, repeaters.get(name)) for name, one in rollouts.items()}
            if self.options.profile:
                with cProfile.Profile() as profile:
                    await modes["scripted"]()
                profile.dump_stats(self.options.profile)
            await self._interleave(modes)

    async def _interleave(self, modes: dict[str, Callable[[], Awaitable[Measured]]]) -> None:
        order = random.Random(SEED)
        for number in range(self.options.rounds):
            measured: dict[str, Measured] = {}
            for name in order.sample(sorted(modes), len(modes)):
                await self._fresh()
                measured[name] = await modes[name]()
                speed = f"{measured[name].tokens_per_s:8,.0f} tokens/s"
                say(f"round {number + 1} of {self.options.rounds}: {name:9} {speed}")
            check(measured)
            self.keep({name: figures(measured, name) for name in modes})

    async def _fresh(self) -> None:
        """Empties the prefix caches, and collects the garbage of the mode before."""
        for replica in self.replicas:
            await replica._engine.reset_prefix_cache()
        gc.collect()

    async def _bare(self) -> Measured:
        return await bare(self.replicas, self.schedules, self.options.concurrent)

    async def _rolled(self, rollouts: Rollouts, repeater: Repeater | None = None) -> Measured:
        measured = await rolled(rollouts, self.prompts, SAMPLES, self.options.concurrent)
        if repeater:
            measured.unknown, repeater.unknown = repeater.unknown, 0
        return measured

    def _replica(self, index: int, core: int | None, on_step: Callable[[int, KvSample], None]) -> Replica:
        config = ReplicaConfig(
            checkpoint=str(self.checkpoint),
            max_model_len=MAX_TOKENS + 32,
            max_num_seqs=max(256, self.options.concurrent),
            kv_blocks=2048 if self.options.device is None else None,
            devices=() if self.options.device is None else (self.options.device,),
            dtype="float32" if self.options.device is None else "bfloat16",
        )
        self.replicas.append(Replica(config, index, core, on_step))
        return self.replicas[-1]


def check(measured: Round) -> None:
    """Raises BenchFailed where the modes did not generate the same."""
    tokens_off = max(abs(one.tokens / measured["bare"].tokens - 1) for one in measured.values())
    calls = len(latencies(measured["jailed"]))
    unknown = max(one.unknown for one in measured.values())
    if tokens_off > OFF or unknown > OFF * calls:
        raise BenchFailed(f"the modes differ: by {tokens_off:.1%} of the tokens, {unknown} unknown answers of {calls}")


def latencies(measured: Measured) -> list[float]:
    uses = (use for trajectory in measured.trajectories for use in trajectory.tool_uses)
    return [use.finished_at - use.dispatched_at for use in uses if use.executed]


def figures(measured: Round, name: str) -> dict[str, float]:
    """Returns the figures of a mode in a round. Counts are those of the scripted mode, which generates the same."""
    mode, bare_mode, counted = measured[name], measured["bare"], measured["scripted"]
    values = {
        "tokens_per_s": mode.tokens_per_s,
        "of_bare": mode.tokens_per_s / bare_mode.tokens_per_s,
        "of_bare_cpu": mode.tokens_per_cpu_s / bare_mode.tokens_per_cpu_s,
        "token_s": mode.frontend_s / counted.tokens,
        "turn_s": mode.frontend_s / sum(len(trajectory.turns) for trajectory in counted.trajectories),
        "trajectory_s": mode.frontend_s / len(counted.trajectories),
    }
    if name == "jailed" and (calls_s := latencies(mode)):  # a model of random weights calls no tool
        values |= {"call_mean_s": float(np.mean(calls_s)), "call_p99_s": float(np.percentile(calls_s, 99))}
    return values


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("tokens_per_s", "of_bare", "token_s"),
    quick={"rounds": "2", "trajectories": "512"},
)
