"""How far apart are the engine that samples and the learner that trains, on the same tokens and weights?

    python -m bench mismatch [--quick] [--checkpoint FOLDER] [--pairs float32/float32,bfloat16/float32]

A real replica rolls the quick start's task with jailed tools, turn after turn, under the checkpoint's weights; the
learner scores the same tokens of the same trajectories. One row is |learner - sampler| of the log-probabilities of
sampled tokens in one slice: all of them, a range of positions in the trajectory, a turn. kl is the mean of
r - 1 - log r with r = learner / sampler (k3), in nats per token. A pair is sampler/learner.

mismatch_mean_<pair> is what `LearnerConfig.mismatch_tolerance` has to hold. Where float32/float32 grows with the
position or the turn, something is wrong with the cache, the positions or the packing; noise does not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray

from algo.learner.config import LearnerConfig
from bench import ROOT
from bench.measuring.report import at_least, environment, existing, fill, finish, interruptible, names, say
from engine.balancing.kv_aware import KvAware
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.learner.messages import Configure
from engine.learner.process import LearnerProcess, LearnerProcessConfig
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.replica.replica import Replica
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.run.workspace import workspace
from engine.telemetry.timeline import Timeline
from engine.types import Batch, Floats, Trajectory
from recipes.tiny.task import MAX_TOKENS, MAX_TOOL_CALLS, prompts, python_tool
from sandbox import TIERS, Limits, Sandbox, SandboxConfig

TINY = ROOT / "recipes/tiny/agent"
PAIRS = ("float32/float32", "bfloat16/float32", "bfloat16/bfloat16", "float32/bfloat16")
BUCKET = 64  # positions of a row
SEED = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """Learner - sampler of each sampled token, its position in the trajectory and its turn (from 1). [M]."""

    difference_M: NDArray[np.float64]
    positions_M: NDArray[np.int64]
    turns_M: NDArray[np.int64]

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], learner_N: Floats) -> Compared:
        """learner_N: log-probabilities on the N axis of `Batch.of(trajectories)`."""
        starts = np.cumsum([0, *(len(trajectory.token_ids_T) for trajectory in trajectories)])
        parts = []
        for start, trajectory in zip(starts, trajectories, strict=False):
            for number, turn in enumerate(trajectory.turns):
                span = np.arange(turn.start, turn.end)
                difference = learner_N[start + span].astype(np.float64) - trajectory.logprobs_T[span]
                parts.append((difference, span, np.full(len(span), number + 1)))
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def slices(self) -> Iterator[tuple[str, NDArray[np.float64]]]:
        """What a row is about, and its differences."""
        yield "all", self.difference_M
        for low in range(0, int(self.positions_M.max()) + 1, BUCKET):
            inside_M = (self.positions_M >= low) & (self.positions_M < low + BUCKET)
            if inside_M.any():
                yield f"position {low}-{low + BUCKET - 1}", self.difference_M[inside_M]
        for turn in np.unique(self.turns_M).tolist():
            yield f"turn {turn}", self.difference_M[self.turns_M == turn]


def figures(difference_M: NDArray[np.float64]) -> dict[str, float]:
    """Of |difference|, and the k3 estimate of KL(sampler || learner)."""
    size_M = np.abs(difference_M)
    return {
        "mean": float(size_M.mean()),
        "p50": float(np.percentile(size_M, 50)),
        "p99": float(np.percentile(size_M, 99)),
        "max": float(size_M.max()),
        "kl": float((np.expm1(difference_M) - difference_M).mean()),
    }


def devices(options: argparse.Namespace) -> tuple[int, ...]:
    return () if options.device is None else (options.device,)


async def rolled(options: argparse.Namespace, dtype: str) -> list[Trajectory]:
    """One sample of each problem by one replica of that dtype, with the checkpoint's own weights."""
    config = ReplicaConfig(
        checkpoint=str(options.checkpoint),
        max_model_len=MAX_TOKENS + 32,
        kv_blocks=2048,
        dtype=dtype,
        devices=devices(options),
    )
    limits = Limits(wall_s=2.0, cpu_s=2.0, memory_bytes=512 << 20)
    async with AsyncExitStack() as stack:
        box = await stack.enter_async_context(Sandbox(SandboxConfig(slots=4, limits=limits, tiers=TIERS[:1])))
        timeline = Timeline()
        one_replica = Fleet(FleetConfig(replicas=1), partial(Replica, config), KvAware(MAX_TOKENS), timeline)
        fleet = await stack.enter_async_context(one_replica)
        budget = RolloutConfig(max_tokens=MAX_TOKENS, max_turns=MAX_TOOL_CALLS + 1)
        rollouts = Rollouts(budget, ChatTemplate.load(options.checkpoint), fleet, [python_tool(box)], timeline, SEED)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(rollouts.run(prompt, 0, number), name=prompt.id)
                for number, prompt in enumerate(islice(prompts("train", SEED), options.trajectories))
            ]
    found = [task.result() for task in running]
    return [trajectory for trajectory in found if trajectory.error is None and trajectory.sampled_tokens]


async def scored(options: argparse.Namespace, dtype: str, batches: Sequence[Batch], folder: Path) -> list[Floats]:
    """What a learner of that dtype says of each batch."""
    on = "cpu" if options.device is None else "cuda"
    config = LearnerConfig(threads=options.threads, dtype=dtype, device=on)
    message = Configure(
        checkpoint=str(options.checkpoint.resolve()),
        learner=dataclasses.asdict(config),
        canary=[],
        weights_dir=str(folder),
        seed=SEED,
    )
    settings = LearnerProcessConfig(module="algo.learner", devices=devices(options))
    async with LearnerProcess(settings, folder, folder / f"learner-{dtype}.log") as learner:
        await learner.configure(message)
        return [await learner.score(batch) for batch in batches]


async def measure(options: argparse.Namespace, found: dict[str, Compared]) -> None:
    """By pair."""
    pairs = [pair.split("/") for pair in options.pairs]
    rollouts: dict[str, list[Trajectory]] = {}
    compared: dict[str, Compared] = {}
    with workspace() as folder:
        for dtype in sorted({sampler for sampler, _ in pairs}):
            say(f"{options.trajectories} rollouts in {dtype}")
            rollouts[dtype] = await rolled(options, dtype)
        for dtype in sorted({learner for _, learner in pairs}):
            say(f"the learner scores them in {dtype}")
            samplers = [sampler for sampler, learner in pairs if learner == dtype]
            batches = [Batch.of(0, rollouts[one], np.zeros(len(rollouts[one]), np.float32)) for one in samplers]
            for sampler, logprobs_N in zip(samplers, await scored(options, dtype, batches, folder), strict=True):
                compared[f"{sampler}/{dtype}"] = Compared.of(rollouts[sampler], logprobs_N)
    found |= {pair: compared[pair] for pair in options.pairs}


def report(found: dict[str, Compared]) -> tuple[list[list[str]], dict[str, float]]:
    """Rows of the table, and the metrics of the JSON line: a pair of equal dtypes has that dtype's name."""
    rows: list[list[str]] = []
    metrics: dict[str, float] = {}
    for pair, compared in found.items():
        sampler, learner = pair.split("/")
        name = sampler if sampler == learner else f"{sampler}_{learner}"
        for title, difference_M in compared.slices():
            numbers = figures(difference_M)
            rows.append([pair, title, f"{len(difference_M):,}", *(f"{value:.1e}" for value in numbers.values())])
            if title == "all":
                metrics |= {f"mismatch_{kind}_{name}": numbers[kind] for kind in ("max", "mean", "kl")}
    return rows, metrics


def show(options: argparse.Namespace, machine: dict[str, Any], found: dict[str, Compared]) -> None:
    rows, metrics = report(found)
    header = ("sampler/learner", "tokens of", "tokens", "mean", "p50", "p99", "max", "kl")
    title = "|learner - sampler| of log-probabilities, one checkpoint"
    finish("mismatch", title, header, rows, config=vars(options), metrics=metrics, environment=machine)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench mismatch", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="128 trajectories instead of 1,024")
    parser.add_argument(
        "--checkpoint", type=existing("config.json"), default=TINY, help="Hugging Face folder with a chat template"
    )
    parser.add_argument("--pairs", type=names(PAIRS), help="sampler/learner")
    parser.add_argument("--device", type=at_least(0), help="a GPU instead of the CPU, for one after the other")
    parser.add_argument("--trajectories", type=at_least(1))
    parser.add_argument("--threads", type=at_least(1), default=2, help="of the learner")
    options = parser.parse_args(given)
    pairs = list(PAIRS[:3] if options.device is None else PAIRS[2:])  # packed attention on a GPU is in bfloat16
    fill(options, trajectories=(128, 1024), pairs=(pairs, pairs))
    return options


def main() -> None:
    prepare_environment()
    options, machine = arguments(), environment()
    found: dict[str, Compared] = {}
    interruptible(lambda: uvloop.run(measure(options, found)), lambda: show(options, machine, found), found)
