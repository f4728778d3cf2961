"""What does a rollout cost on top of its engines? Ours against the same engines generating the same tokens alone.

    python -m bench.rollout [--quick] [--only load,scale] [--checkpoint FOLDER] [--profile FILE]

load    trajectories of the quick start's task with a trained policy, 256 at a time on two vLLM replicas and two cores,
        in interleaved rounds: bare engines (the floor: no fleet, chat, parser or tools), rollouts whose tools answer
        at once, rollouts with jailed tools, rollouts whose tools sleep 0.3 s. raw_fraction: tokens/s of the second over
        those of the first; raw_fraction_jailed: of the third; *_cpu: the same in tokens per CPU second of all
        processes, which other load on the machine disturbs less. Ratios of medians.
scale   4,096 trajectories on scripted replicas that step like engines, 16,384 more waiting: lag of the event loop,
        memory, what is left over.

Without --checkpoint the policy is trained once by recipes/quickstart.py, for two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import random
import subprocess
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
from rich.console import Console
from rich.table import Table

from bench.report import environment, finish
from bench.rollout_load import Measured, Recorder, Repeater, Schedule, bare, rolled
from bench.rollout_scale import QUEUED, RUNNING, scale
from bench.rollout_scale import REPLICAS as MANY
from engine.chat import Chat
from engine.fleet import Fleet, FleetConfig
from engine.kv_aware import KvAware
from engine.replica import Replica, ReplicaConfig, prepare_environment
from engine.rollout import RolloutConfig, Rollouts
from engine.tools import PythonTool
from engine.trace import Timeline
from recipes.tiny_task import MAX_TOKENS, MAX_TOOL_CALLS, prompts
from sandbox import TIERS, Limits, Sandbox, SandboxConfig

ROOT = Path(__file__).resolve().parents[1]
TRAINED = Path("runs/bench/rollout")
SAMPLES = 16  # per prompt, as in the quick start
REPLICAS = 2
SLEEP_S = 0.3
SEED = 0


def trained() -> Path:
    """The checkpoint of a short run of the quick start, made if it is not there."""
    checkpoint = TRAINED / "checkpoint"
    if not (checkpoint / "config.json").is_file():
        fields = [f"runs={TRAINED.parent}", f"name={TRAINED.name}", "steps=16", "eval_every=16"]
        subprocess.run([sys.executable, str(ROOT / "recipes/quickstart.py"), *fields], check=True)
    return checkpoint


class Load:
    """Two replicas, and one Rollouts per kind of tool on one fleet."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.prompts = list(islice(prompts("train", SEED), options.trajectories // SAMPLES))
        self.replicas: list[Replica] = []
        self.schedules: list[Schedule] = []
        self.rounds: dict[str, list[Measured]] = {}

    async def run(self) -> dict[str, list[Measured]]:
        """Measured runs by mode, one per round."""
        options = self.options
        async with AsyncExitStack() as stack:
            chat = Chat.load(options.checkpoint)
            limits = Limits(wall_s=2.0, cpu_s=2.0, memory_bytes=512 << 20)
            box = await stack.enter_async_context(Sandbox(SandboxConfig(slots=8, limits=limits, tiers=TIERS[:1])))
            recorder = Recorder(box)
            timeline = Timeline()
            fleet = Fleet(FleetConfig(replicas=REPLICAS), self._replica, KvAware(MAX_TOKENS), timeline)
            await stack.enter_async_context(fleet)
            budget = RolloutConfig(max_tokens=MAX_TOKENS, max_turns=MAX_TOOL_CALLS + 1)
            at_once, late = Repeater(recorder.answers), Repeater(recorder.answers, SLEEP_S)
            runners = {"record": recorder, "jailed": box, "scripted": at_once, "sleeping": late}
            rollouts = {
                name: Rollouts(budget, chat, fleet, [PythonTool(runner)], timeline, SEED)
                for name, runner in runners.items()
            }
            gc.freeze()  # as the quick start does: what vLLM and torch brought along is not collected again and again
            gc.set_threshold(50_000, 20, 1_000_000)
            recorded = await self._rolled(rollouts.pop("record"))
            self.schedules = [Schedule.of(trajectory, SEED) for trajectory in recorded.trajectories]
            modes: dict[str, Callable[[], Awaitable[Measured]]] = {"bare": self._bare}
            modes |= {name: partial(self._rolled, one) for name, one in rollouts.items()}
            if options.profile:
                await self._profiled(modes["scripted"])
            await self._interleave(modes)
        return self.rounds

    async def _interleave(self, modes: dict[str, Callable[[], Awaitable[Measured]]]) -> None:
        order = random.Random(SEED)
        self.rounds = {name: [] for name in modes}
        for number in range(self.options.rounds):
            for name in order.sample(sorted(modes), len(modes)):
                await self._fresh()
                measured = await modes[name]()
                self.rounds[name].append(measured)
                print(f"round {number + 1}: {name:9} {measured.tokens_per_s:8,.0f} tokens/s", file=sys.stderr)

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

    async def _rolled(self, rollouts: Rollouts) -> Measured:
        return await rolled(rollouts, self.prompts, SAMPLES, self.options.concurrent)

    def _replica(self, index: int, core: int | None, on_step: Callable[..., None]) -> Replica:
        config = ReplicaConfig(checkpoint=str(self.options.checkpoint), max_model_len=MAX_TOKENS + 32, kv_blocks=2048)
        replica = Replica(config, index, core, on_step)
        self.replicas.append(replica)
        return replica


def load_metrics(rounds: dict[str, list[Measured]]) -> dict[str, Any]:
    def typical(name: str, what: str) -> float:
        return median(getattr(measured, what) for measured in rounds[name])

    def fraction(name: str, what: str) -> float:
        return typical(name, what) / typical("bare", what)

    metrics: dict[str, Any] = {
        "raw_fraction": fraction("scripted", "tokens_per_s"),
        "raw_fraction_cpu": fraction("scripted", "tokens_per_cpu_s"),
        "raw_fraction_jailed": fraction("jailed", "tokens_per_s"),
        "raw_fraction_jailed_cpu": fraction("jailed", "tokens_per_cpu_s"),
        "sleep_step_ratio": typical("sleeping", "wall_s") / typical("scripted", "wall_s"),
    }
    trajectories = [trajectory for measured in rounds["jailed"] for trajectory in measured.trajectories]
    latency_ms = [1e3 * (u.finished_at - u.dispatched_at) for t in trajectories for u in t.tool_uses if u.executed]
    metrics |= {"tool_latency_mean_ms": float(np.mean(latency_ms))}
    metrics |= {f"tool_latency_p{q}_ms": float(np.percentile(latency_ms, q)) for q in (50, 99)}
    metrics |= {"tool_calls": len(latency_ms) // len(rounds["jailed"])}
    one = rounds["scripted"][0]
    counts = {
        "token": one.tokens,
        "turn": sum(len(trajectory.turns) for trajectory in one.trajectories),
        "trajectory": len(one.trajectories),
    }
    metrics |= {"tokens": counts["token"], "turns": counts["turn"], "trajectories": counts["trajectory"]}
    for name in rounds:
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
    return [
        ["lag of the loop, p99 ms (max)", f"{metrics['loop_lag_p99_ms']:.1f} ({metrics['loop_lag_max_ms']:.0f})"],
        ["lag in CPU time, p99 ms", f"{metrics['loop_lag_cpu_p99_ms']:.1f}"],
        ["bytes per trajectory", f"{metrics['bytes_per_trajectory']:,.0f}"],
        ["tokens/s", f"{metrics['scale_tokens_per_s']:,.0f}"],
        ["CPU us per token", f"{metrics['scale_cpu_us_per_token']:.1f}"],
        ["trajectories ended", f"{metrics['scale_ended']:,}"],
        ["tasks, turns left over", f"{metrics['tasks_left']}, {metrics['turns_left']}"],
    ]


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.rollout", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 rounds of 512 trajectories instead of 5 of 1,024")
    parser.add_argument("--only", choices=("load", "scale"), help="one part instead of both")
    parser.add_argument("--checkpoint", type=Path, help="folder of a trained policy")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--trajectories", type=int, help=f"per mode and round, a multiple of {SAMPLES}")
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--queued", type=int, default=QUEUED, help=f"beyond the {MANY * RUNNING} that run")
    parser.add_argument("--profile", help="write a cProfile of one scripted run there")
    options = parser.parse_args(argv)
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.trajectories = options.trajectories or (512 if options.quick else 1024)
    options.checkpoint = options.checkpoint or trained()
    return options


def main() -> None:
    prepare_environment()
    options = options_of(sys.argv[1:])
    machine = environment()
    header: tuple[str, ...] = ("", "")
    rows: list[list[str]] = []
    metrics: dict[str, Any] = {}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.only != "load":
            metrics |= runner.run(scale(options.checkpoint, options.queued))
            rows = scale_rows(metrics)
        if options.only != "scale":
            if rows:
                show(f"{MANY * RUNNING:,} trajectories running, {options.queued:,} waiting", header, rows)
            rounds = runner.run(Load(options).run())
            metrics |= load_metrics(rounds)
            header = ("", "tokens/s", "of bare", "CPU us per token", "per turn", "per trajectory")
            rows = load_rows(metrics, list(rounds))
    config = {name: str(value) for name, value in vars(options).items()}
    title = "Rollouts; CPU of the node's own process"
    finish("rollout", title, header, rows, config=config, metrics=metrics, environment=machine)


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
