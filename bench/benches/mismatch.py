"""How far apart are the engine that samples and the learner that trains, on the same tokens and weights?

    rocstar bench mismatch [rounds=3] [checkpoint=FOLDER] [pairs=float32/float32,bfloat16/float32]

A real replica rolls the quick start's task with jailed tools, turn after turn, under the checkpoint's weights; the
learner scores the same tokens of the same trajectories. A row is |learner - sampler| of the log-probabilities of
sampled tokens. A pair is sampler/learner. A round has problems of its own.

The mean is what `LearnerConfig.mismatch_tolerance` has to hold. Where float32/float32 grows with the position or the
turn, something is wrong with the cache, the positions or the packing; noise does not grow.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import uvloop
from numpy.typing import NDArray

from algo.learner.config import LearnerConfig
from bench.measuring.bench import Bench, Keep
from bench.measuring.metric import count
from bench.measuring.terminal import say
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
from recipes.tiny.task import MAX_TOKENS, MAX_TOOL_CALLS, SHIPPED, prompts, python_tool
from sandbox import TIERS, Limits, Sandbox, SandboxConfig
from sandbox.require import at_least, require_fields

Dtype = Literal["float32", "bfloat16"]
Pair = Literal["float32/float32", "bfloat16/float32", "bfloat16/bfloat16", "float32/bfloat16"]
DTYPES: dict[str, Dtype] = {"float32": "float32", "bfloat16": "bfloat16"}
EARLY, LATE = 64, 128  # positions below and from which a token is early or late in its trajectory
SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "sets of problems"] = 3
    trajectories: Annotated[int, "problems of a round, one sample each"] = 256
    pairs: Annotated[tuple[Pair, ...], "sampler/learner"] = ("float32/float32", "bfloat16/float32", "bfloat16/bfloat16")
    checkpoint: Annotated[Path, "Hugging Face folder with a chat template"] = SHIPPED
    device: Annotated[int | None, "a GPU instead of the CPU, for one after the other"] = None
    threads: Annotated[int, "threads of the learner"] = 2
    fp32_head: Annotated[bool, "a learner in bfloat16 computes its logits in float32"] = False

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds", "trajectories", "threads")
        if not (self.checkpoint / "config.json").is_file():
            raise ValueError(f"checkpoint must be a folder with config.json, got {str(self.checkpoint)!r}")
        if self.device is not None and any(pair.endswith("/float32") for pair in self.pairs):
            raise ValueError("pairs must end with /bfloat16 on a device: packed attention on a GPU is in bfloat16")

    @property
    def devices(self) -> tuple[int, ...]:
        return () if self.device is None else (self.device,)


METRICS = {
    "mean": count("mean", "mean |difference|", form=".1e"),
    "p99": count("p99", "99th percentile of |difference|", form=".1e"),
    "max": count("largest", "largest |difference|", form=".1e", summary="largest"),
    "kl": count("kl", "mean of r - 1 - log r with r = learner / sampler, in nats per token", form=".1e"),
    "late_over_early": count("late / early", f"mean from position {LATE} on over that below {EARLY}"),
    "later_over_first": count("later / first turn", "mean in later turns over that in the first", form=".2f"),
    "tokens": count("tokens", "sampled tokens that were compared"),
}


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

    def figures(self) -> dict[str, float]:
        """Returns the figures of a pair; those that compare slices only where both have tokens."""
        size_M = np.abs(self.difference_M)
        figures = {
            "mean": float(size_M.mean()),
            "p99": float(np.percentile(size_M, 99)),
            "max": float(size_M.max()),
            "kl": float((np.expm1(self.difference_M) - self.difference_M).mean()),
        }
        slices = {
            "late_over_early": (self.positions_M >= LATE, self.positions_M < EARLY),
            "later_over_first": (self.turns_M > 1, self.turns_M == 1),
        }
        for name, (above_M, below_M) in slices.items():
            if above_M.any() and below_M.any() and size_M[below_M].any():
                figures[name] = float(size_M[above_M].mean() / size_M[below_M].mean())
        return figures | {"tokens": len(size_M)}


def measure(options: Options, keep: Keep) -> None:
    prepare_environment()
    for number in range(options.rounds):
        keep({pair: compared.figures() for pair, compared in uvloop.run(_round(options, number)).items()})


async def _round(options: Options, number: int) -> dict[str, Compared]:
    pairs = [parts_of(pair) for pair in options.pairs]
    rollouts: dict[Dtype, list[Trajectory]] = {}
    compared: dict[str, Compared] = {}
    with workspace() as folder:
        for dtype in sorted({sampler for sampler, _ in pairs}):
            say(f"round {number + 1} of {options.rounds}: {options.trajectories} rollouts in {dtype}")
            rollouts[dtype] = await rolled(options, dtype, number)
        for dtype in sorted({learner for _, learner in pairs}):
            say(f"round {number + 1} of {options.rounds}: the learner scores them in {dtype}")
            samplers = [sampler for sampler, learner in pairs if learner == dtype]
            batches = [Batch.of(0, rollouts[one], np.zeros(len(rollouts[one]), np.float32)) for one in samplers]
            for sampler, logprobs_N in zip(samplers, await scored(options, dtype, batches, folder), strict=True):
                compared[f"{sampler}/{dtype}"] = Compared.of(rollouts[sampler], logprobs_N)
    return {pair: compared[pair] for pair in options.pairs}


def parts_of(pair: Pair) -> tuple[Dtype, Dtype]:
    """Returns the dtypes of sampler and learner."""
    sampler, learner = (DTYPES[name] for name in pair.split("/"))
    return sampler, learner


async def rolled(options: Options, dtype: Dtype, number: int) -> list[Trajectory]:
    """Samples each problem once by one replica of that dtype, with the checkpoint's own weights."""
    config = ReplicaConfig(
        checkpoint=str(options.checkpoint),
        max_model_len=MAX_TOKENS + 32,
        kv_blocks=2048,
        dtype=dtype,
        devices=options.devices,
    )
    limits = Limits(wall_s=2.0, cpu_s=2.0, memory_bytes=512 << 20)
    async with AsyncExitStack() as stack:
        box = await stack.enter_async_context(Sandbox(SandboxConfig(slots=4, limits=limits, tiers=TIERS[:1])))
        timeline = Timeline()
        one_replica = Fleet(FleetConfig(replicas=1), partial(Replica, config), KvAware(MAX_TOKENS), timeline)
        fleet = await stack.enter_async_context(one_replica)
        budget = RolloutConfig(max_tokens=MAX_TOKENS, max_turns=MAX_TOOL_CALLS + 1)
        chat = ChatTemplate.load(options.checkpoint)
        rollouts = Rollouts(budget, chat, fleet, [python_tool(box)], timeline, SEED)
        begin = number * options.trajectories
        problems = islice(prompts("train", SEED), begin, begin + options.trajectories)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(rollouts.run(prompt, 0, group), name=prompt.id)
                for group, prompt in enumerate(problems)
            ]
    trajectories = [task.result() for task in running]
    return [trajectory for trajectory in trajectories if trajectory.error is None and trajectory.sampled_tokens]


async def scored(options: Options, dtype: Dtype, batches: Sequence[Batch], folder: Path) -> list[Floats]:
    """Returns what a learner of that dtype says of each batch."""
    config = LearnerConfig(
        threads=options.threads,
        dtype=dtype,
        fp32_head=options.fp32_head,
        device="cuda" if options.devices else "cpu",
    )
    message = Configure(
        checkpoint=str(options.checkpoint.resolve()),
        learner=dataclasses.asdict(config),
        canary=[],
        weights_dir=str(folder),
        seed=SEED,
    )
    settings = LearnerProcessConfig(module="algo.learner", devices=options.devices)
    async with LearnerProcess(settings, folder, folder / f"learner-{dtype}.log") as learner:
        await learner.configure(message)
        return [await learner.score(batch) for batch in batches]


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("mean", "max", "kl"),
    quick={"rounds": "1", "trajectories": "128"},
)
