"""What does a rollout cost on top of its engines? Ours against the same engines generating the same tokens alone.

    python -m bench rollout [--quick] [--only load,scale] [--checkpoint FOLDER] [--profile FILE]

load    trajectories of the quick start's task with a trained policy, 256 at a time on two vLLM replicas and two cores,
        in interleaved rounds: bare engines (the floor: no fleet, chat, parser or tools), rollouts whose tools answer
        at once, rollouts with jailed tools, rollouts whose tools sleep 0.3 s. raw_fraction: tokens/s of the second over
        those of the first; raw_fraction_jailed: of the third; *_cpu: the same in tokens per CPU second of all
        processes, which other load on the machine disturbs less. Ratios of medians. All modes generate the same tokens
        but for what rounding in other batches changes: tokens_off is the largest difference of their number from that
        of bare, as a share, tools_unknown what scripted tools were asked beyond what was recorded. Above 1 % it fails.
scale   4,096 trajectories on scripted replicas that step like engines, 16,384 more waiting: lag of the event loop in
        wall and in CPU time, memory when all wait, at its peak and at the end, what is left over (else it fails).

Without --checkpoint the policy is trained once by recipes/quickstart.py, for two minutes.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import uvloop

from bench import ROOT
from bench.benches.rollout.load import Measured, Recorder, Repeater, Schedule, bare, rolled
from bench.benches.rollout.scale import QUEUED, RUNNING, scale
from bench.benches.rollout.scale import REPLICAS as MANY
from bench.measuring.processes import child
from bench.measuring.report import (
    at_least,
    environment,
    existing,
    fill,
    finish,
    interruptible,
    names,
    say,
    table,
    writable,
)
from engine.balancing.kv_aware import KvAware
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.replica.replica import Replica
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.run.workspace import workspace
from engine.telemetry.timeline import Timeline
from engine.tools.python_tool import PythonTool
from recipes.tiny.task import MAX_TOKENS, MAX_TOOL_CALLS, prompts
from sandbox import TIERS, Limits, Sandbox, SandboxConfig

TRAINED = Path("runs/bench/rollout")
PARTS = ("load", "scale")
SAMPLES = 16  # per prompt, as in the quick start
REPLICAS = 2
SLEEP_S = 0.3
SEED = 0
OFF = 0.01  # share of tokens or tool calls by which modes may differ

Round = dict[str, Measured]  # by mode


def trained() -> Path:
    """The checkpoint of a short run of the quick start, made if it is not there."""
    checkpoint = TRAINED / "checkpoint"
    if not (checkpoint / "config.json").is_file():
        say(f"a policy is trained: {TRAINED}")
        fields = [f"runs={TRAINED.parent}", f"name={TRAINED.name}", "steps=16", "eval_every=16"]
        with child([sys.executable, str(ROOT / "recipes/quickstart.py"), *fields]) as process:
            if code := process.wait():
                sys.exit(f"the quick start ended with exit code {code}")
    return checkpoint


class Load:
    """Two replicas, and one Rollouts per kind of tool on one fleet. add: gets whole rounds."""

    def __init__(self, options: argparse.Namespace, add: Callable[[Round], None]) -> None:
        self.options, self.add = options, add
        self.prompts = list(islice(prompts("train", SEED), options.trajectories // SAMPLES))
        self.replicas: list[Replica] = []
        self.schedules: list[Schedule] = []

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            chat = ChatTemplate.load(self.options.checkpoint)
            limits = Limits(wall_s=2.0, cpu_s=2.0, memory_bytes=512 << 20)
            box = await stack.enter_async_context(Sandbox(SandboxConfig(slots=8, limits=limits, tiers=TIERS[:1])))
            recorder = Recorder(box)
            timeline = Timeline()
            balancer = KvAware(MAX_TOKENS, moves=0)  # a request that moves goes on under another seed
            replicas = REPLICAS if self.options.device is None else 1
            fleet = Fleet(FleetConfig(replicas=replicas), self._replica, balancer, timeline)
            await stack.enter_async_context(fleet)
            budget = RolloutConfig(max_tokens=MAX_TOKENS, max_turns=MAX_TOOL_CALLS + 1)
            at_once, late = Repeater(recorder.answers), Repeater(recorder.answers, SLEEP_S)
            repeaters = {"scripted": at_once, "sleeping": late}
            runners = {"record": recorder, "jailed": box, **repeaters}
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
                await self._profiled(modes["scripted"])
            await self._interleave(modes)

    async def _interleave(self, modes: dict[str, Callable[[], Awaitable[Measured]]]) -> None:
        order = random.Random(SEED)
        for number in range(self.options.rounds):
            found: Round = {}
            for name in order.sample(sorted(modes), len(modes)):
                await self._fresh()
                found[name] = await modes[name]()
                speed = f"{found[name].tokens_per_s:8,.0f} tokens/s"
                say(f"round {number + 1} of {self.options.rounds}: {name:9} {speed}")
            self.add({name: found[name] for name in modes})

    async def _profiled(self, mode: Callable[[], Awaitable[Measured]]) -> None:
        with cProfile.Profile() as profile:
            await mode()
        profile.dump_stats(self.options.profile)

    async def _fresh(self) -> None:
        """Empty prefix caches; the garbage of the mode before is not the next one's."""
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

    def _replica(self, index: int, core: int | None, on_step: Callable[..., None]) -> Replica:
        config = ReplicaConfig(
            checkpoint=str(self.options.checkpoint),
            max_model_len=MAX_TOKENS + 32,
            max_num_seqs=max(256, self.options.concurrent),
            kv_blocks=2048 if self.options.device is None else None,
            devices=() if self.options.device is None else (self.options.device,),
            dtype="float32" if self.options.device is None else "bfloat16",
        )
        self.replicas.append(Replica(config, index, core, on_step))
        return self.replicas[-1]


def load_metrics(rounds: Sequence[Round]) -> dict[str, Any]:
    def typical(name: str, what: str) -> float:
        return median(getattr(found[name], what) for found in rounds)

    def fraction(name: str, what: str) -> float:
        return typical(name, what) / typical("bare", what)

    metrics: dict[str, Any] = {
        "raw_fraction": fraction("scripted", "tokens_per_s"),
        "raw_fraction_cpu": fraction("scripted", "tokens_per_cpu_s"),
        "raw_fraction_jailed": fraction("jailed", "tokens_per_s"),
        "raw_fraction_jailed_cpu": fraction("jailed", "tokens_per_cpu_s"),
        "sleep_step_ratio": typical("sleeping", "wall_s") / typical("scripted", "wall_s"),
        "tokens_off": max(abs(one.tokens / found["bare"].tokens - 1) for found in rounds for one in found.values()),
        "tools_unknown": max(one.unknown for found in rounds for one in found.values()),
    }
    trajectories = [trajectory for found in rounds for trajectory in found["jailed"].trajectories]
    latency_ms = [1e3 * (u.finished_at - u.dispatched_at) for t in trajectories for u in t.tool_uses if u.executed]
    metrics |= {"tool_latency_mean_ms": float(np.mean(latency_ms))}
    metrics |= {f"tool_latency_p{q}_ms": float(np.percentile(latency_ms, q)) for q in (50, 99)}
    metrics |= {"tool_calls": len(latency_ms) // len(rounds)}
    one = rounds[0]["scripted"]
    counts = {
        "token": one.tokens,
        "turn": sum(len(trajectory.turns) for trajectory in one.trajectories),
        "trajectory": len(one.trajectories),
    }
    metrics |= {"tokens": counts["token"], "turns": counts["turn"], "trajectories": counts["trajectory"]}
    for name in rounds[0]:
        metrics[f"tokens_per_s_{name}"] = typical(name, "tokens_per_s")
        for what, count in counts.items():
            metrics[f"frontend_us_per_{what}_{name}"] = 1e6 * typical(name, "frontend_s") / count
    return metrics


def load_rows(metrics: dict[str, Any], modes: Sequence[str]) -> list[list[str]]:
    rows = []
    for name in modes:
        share = metrics[f"tokens_per_s_{name}"] / metrics["tokens_per_s_bare"]
        per = [f"{metrics[f'frontend_us_per_{what}_{name}']:,.0f}" for what in ("token", "turn", "trajectory")]
        rows.append([name, f"{metrics[f'tokens_per_s_{name}']:,.0f}", f"{share:.3f}", *per])
    return rows


def scale_rows(metrics: dict[str, Any]) -> list[list[str]]:
    held = [f"{metrics[f'bytes_per_trajectory{when}']:,.0f}" for when in ("", "_peak", "_end")]
    return [
        ["lag of the loop, wall ms, p99 (max)", f"{metrics['loop_lag_p99_ms']:.1f} ({metrics['loop_lag_max_ms']:.0f})"],
        ["lag of the loop, CPU ms, p99", f"{metrics['loop_lag_cpu_p99_ms']:.1f}"],
        ["bytes per trajectory when all wait, at most, at the end", ", ".join(held)],
        ["tokens/s", f"{metrics['scale_tokens_per_s']:,.0f}"],
        ["CPU us per token", f"{metrics['scale_cpu_us_per_token']:.1f}"],
        ["trajectories ended", f"{metrics['scale_ended']:,}"],
        ["tasks, turns left over", f"{metrics['tasks_left']}, {metrics['turns_left']}"],
    ]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench rollout", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 rounds of 512 trajectories instead of 5 of 1,024")
    parser.add_argument("--only", type=names(PARTS), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--checkpoint", type=existing("config.json"), help="folder of a trained policy")
    parser.add_argument("--rounds", type=at_least(1))
    parser.add_argument("--trajectories", type=at_least(SAMPLES), help=f"per mode and round, a multiple of {SAMPLES}")
    parser.add_argument("--concurrent", type=at_least(1), default=256)
    parser.add_argument("--device", type=at_least(0), help="a GPU for one replica instead of the CPU for two")
    parser.add_argument("--queued", type=at_least(0), default=QUEUED, help=f"beyond the {MANY * RUNNING} that run")
    parser.add_argument("--profile", type=writable, help="write a cProfile of one scripted run there")
    options = parser.parse_args(given)
    fill(options, rounds=(2, 5), trajectories=(512, 1024))
    for name in ("trajectories", "queued"):
        if getattr(options, name) % SAMPLES:
            parser.error(f"argument --{name}: {getattr(options, name)} is not a multiple of {SAMPLES}")
    return options


def measure(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Adds the metrics of scale, and the whole rounds of load."""
    options.checkpoint = options.checkpoint or trained()
    if "scale" in options.only:
        say(f"{MANY * RUNNING:,} trajectories running, {options.queued:,} waiting")
        found["scale"] = uvloop.run(scale(options.checkpoint, options.queued))
    if "load" in options.only:
        uvloop.run(Load(options, lambda one: found.setdefault("load", []).append(one)).run())


def show(options: argparse.Namespace, machine: dict[str, Any], found: dict[str, Any]) -> None:
    metrics = dict(found.get("scale", {}))
    header, rows = ("", ""), scale_rows(metrics) if metrics else []
    if rounds := found.get("load"):
        if rows:
            table(f"{MANY * RUNNING:,} trajectories running, {options.queued:,} waiting", header, rows)
        metrics |= load_metrics(rounds)
        header = ("", "tokens/s", "of bare", "CPU us per token", "per turn", "per trajectory")
        rows = load_rows(metrics, list(rounds[0]))
    title = "Rollouts; CPU of the node's own process"
    finish("rollout", title, header, rows, config=vars(options), metrics=metrics, environment=machine)
    if rounds and (metrics["tokens_off"] > OFF or metrics["tools_unknown"] > OFF * metrics["tool_calls"]):
        sys.exit(f"the modes differ: tokens_off {metrics['tokens_off']:.3f}, tools_unknown {metrics['tools_unknown']}")


def main() -> None:
    prepare_environment()
    options, machine = arguments(), environment()
    found: dict[str, Any] = {}
    with workspace():
        interruptible(lambda: measure(options, found), lambda: show(options, machine, found), found)
