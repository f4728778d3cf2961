"""How long from the learner's last optimizer step until all replicas serve the new weights?

    rocstar bench weights [rounds=7] [sizes=tiny,97m] [transports=shm,gloo,adapter,delta] [device=0]

For each size a random Qwen3, its real learner and two real vLLM engines on the CPU. A round begins when a training
step (at a learning rate of 1e-6) has ended: the learner publishes its weights as a new version, and both engines load
them and pass the canary, with no request in flight. Then the same again while a request is under way.

shm and gloo move all weights; adapter moves a LoRA adapter of rank 32, which is loaded beside the older ones; delta
moves the changed bytes of all weights, written and applied as for nodes (`engine.nodes.deltas`), and then loads as shm
does. With `device` learner and one engine share a GPU in bfloat16; for nccl the engine has the GPU after it.

The floor is a plain copy of the same bytes in the same round, with a thread per core. An update holds more than one
copy: the learner's, that of each engine (each on one core), the kernels' packing of it, and a forward pass of the
canary on both sides. tiny and 97m are fp32; 600m is bf16 in the engines, fp32 in the learner (some 10 GB in all).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from algo.learner.config import LearnerConfig
from bench.measuring.bench import Bench, Keep
from bench.measuring.metric import megabytes, milliseconds, ratio
from bench.measuring.terminal import say
from engine.balancing.round_robin import RoundRobin
from engine.fleet.canary import tolerance_of
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.learner.messages import Configure
from engine.learner.process import LearnerProcess, LearnerProcessConfig
from engine.nodes import deltas
from engine.nodes.messages import FileInfo
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.replica.port import Sampling
from engine.replica.replica import Replica
from engine.run.workspace import workspace
from engine.telemetry.timeline import Timeline
from engine.types import Batch, Floats, PublishedWeights
from sandbox.require import at_least, require_fields, within

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab": 4096, "hidden": 256, "inner": 768, "layers": 3, "heads": 8, "kv_heads": 2, "head": 32},
    "97m": {"vocab": 28032, "hidden": 768, "inner": 2048, "layers": 12, "heads": 12, "kv_heads": 4, "head": 64},
    "600m": {"vocab": 151936, "hidden": 1024, "inner": 3072, "layers": 28, "heads": 16, "kv_heads": 8, "head": 128},
}
DTYPES = {"tiny": "float32", "97m": "float32", "600m": "bfloat16"}
FLOOR_BYTES = 256 << 20
Size = Literal["tiny", "97m", "600m"]
Transport = Literal["shm", "gloo", "adapter", "delta", "nccl"]
ON_GPU = ("shm", "adapter", "nccl")
LORA_RANK = 32
UNDER_WAY = 200  # tokens of the request that an update meets
CANARY = [[3 + 7 * number + index for index in range(9)] for number in range(2)]  # 16 rows: MKL takes twice for 14


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "updates of each case, at most 7"] = 7
    sizes: Annotated[tuple[Size, ...], "models"] = ("tiny", "97m")
    transports: Annotated[tuple[Transport, ...], "ways of the weights"] = ("shm", "gloo", "adapter", "delta")
    device: Annotated[int | None, "a GPU instead of the CPU"] = None
    ranks: Annotated[int, "ranks of the learner"] = 1

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "ranks")
        require_fields(self, within("[1, 7]"), "rounds")
        if self.device is not None and not set(self.transports) <= set(ON_GPU):
            raise ValueError(f"transports must be of {', '.join(ON_GPU)} on a device, got {','.join(self.transports)}")
        if self.device is None and "nccl" in self.transports:
            raise ValueError("device must be a GPU for transports=nccl, got none")


METRICS = {
    "moved_bytes": megabytes("moved", "bytes that a version takes"),
    "publish_s": milliseconds("publish", "the learner writes the version"),
    "learner_canary_s": milliseconds("learner canary", "its forward pass over the canary"),
    "delta_s": milliseconds("delta", "written and applied"),
    "load_s": milliseconds("load", "the slower engine loads and packs it"),
    "canary_s": milliseconds("canary", "the slower engine's forward pass"),
    "total_s": milliseconds("total", "from the step's end until both engines serve the version"),
    "stall_s": milliseconds("stall", "longest wait for a token of a request that an update meets, less the usual"),
    "copy_s": milliseconds("copy", "of the same bytes into memory that was written before"),
    "fresh_copy_s": milliseconds("fresh copy", "into memory whose pages the kernel has yet to give"),
    "over_copy": ratio("total / copy", "in the same round", form=".1f"),
}


class Timed(Replica):
    """A replica that measures how long its last update and canary took."""

    load_s = canary_s = 0.0

    async def update_weights(self, path: str, version: int) -> None:
        started = time.perf_counter()
        await super().update_weights(path, version)
        self.load_s = time.perf_counter() - started

    async def logprobs(self, sequences: Any) -> Floats:
        started = time.perf_counter()
        logprobs = await super().logprobs(sequences)
        self.canary_s = time.perf_counter() - started
        return logprobs


def write_model(folder: str, size: str) -> None:
    """Writes a random checkpoint. Not in the node's process, which must not run torch before it forks engines."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = SIZES[size]
    config = Qwen3Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head"],
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        dtype=DTYPES[size],
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(getattr(torch, DTYPES[size])).save_pretrained(folder)


def random_batch(step: int, vocabulary: int = 4000) -> Batch:
    """Makes eight trajectories of 32 tokens, half of them sampled, which pull the weights somewhere."""
    rng = np.random.default_rng(step)
    sampled = np.tile(np.arange(32) >= 16, 8)
    return Batch(
        step=step,
        token_ids_N=rng.integers(3, vocabulary, 8 * 32).astype(np.int32),
        sampled_N=sampled,
        logprobs_N=np.where(sampled, -8.3, 0.0).astype(np.float32),
        versions_N=np.where(sampled, step - 1, -1).astype(np.int32),
        lengths_B=np.full(8, 32, np.int32),
        advantages_B=np.resize([1.0, -1.0], 8).astype(np.float32),
    )


class Floor:
    """Copies as many bytes as the weights have (FLOOR_BYTES at most, and scaled), with a thread per core."""

    def __init__(self, size_bytes: int) -> None:
        self.copied = min(size_bytes, FLOOR_BYTES)
        self.scale = size_bytes / self.copied
        self.source = np.ones(self.copied, np.uint8)
        self.target = np.ones(self.copied, np.uint8)

    def seconds(self, target: NDArray[np.uint8]) -> float:
        threads = len(os.sched_getaffinity(0))
        bounds = [self.copied * index // threads for index in range(threads + 1)]
        parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda part: None, parts))  # the threads are up
            started = time.perf_counter()
            list(pool.map(lambda part: np.copyto(target[part], self.source[part]), parts))
            return (time.perf_counter() - started) * self.scale

    def measure(self) -> dict[str, float]:
        """Returns the seconds of a copy into memory that was written before, and into fresh memory."""
        return {"copy_s": self.seconds(self.target), "fresh_copy_s": self.seconds(np.empty_like(self.source))}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is measured together: a learner and its engines."""

    size: str
    transport: str
    ranks: int
    rounds: int
    checkpoint: Path
    size_bytes: int
    gpu: int | None = None

    @property
    def dtype(self) -> str:
        return DTYPES[self.size] if self.gpu is None else "bfloat16"

    def replica(self) -> ReplicaConfig:
        return ReplicaConfig(
            checkpoint=str(self.checkpoint),
            max_model_len=256,
            max_num_seqs=8,
            kv_blocks=32,
            dtype=self.dtype,
            devices=self.devices,
            memory_share=0.4 if self.devices else None,
            weight_transfer=self.way,
            lora_rank=LORA_RANK if self.transport == "adapter" else 0,
            lora_targets=LearnerConfig().lora_targets,
            adapters=2,
        )

    @property
    def devices(self) -> tuple[int, ...]:
        """Returns the engine's GPU, none on the CPU."""
        if self.gpu is None:
            return ()
        return (self.gpu + 1,) if self.transport == "nccl" else (self.gpu,)

    @property
    def way(self) -> str:
        return "shm" if self.transport == "delta" else self.transport

    def configure(self, folder: Path) -> Configure:
        learner = LearnerConfig(
            threads=max(1, len(os.sched_getaffinity(0)) // self.ranks),
            weight_transfer=self.way,
            weights_dtype=self.dtype,
            dtype="float32" if self.gpu is None else "bfloat16",
            device="cpu" if self.gpu is None else "cuda",
            lora_rank=LORA_RANK if self.transport == "adapter" else 0,
            lr=1e-6,
            warmup_steps=0,
            mismatch_tolerance=None,
        )
        return Configure(
            checkpoint=str(self.checkpoint),
            learner=dataclasses.asdict(learner),
            canary=CANARY,
            weights_dir=str(folder),
            seed=1,
        )


async def measured(case: Case) -> list[dict[str, float]]:
    """Returns the figures of each round but the first, in which memory is made."""
    replicas: list[Timed] = []

    def make(index: int, core: int | None, on_step: Any) -> Timed:
        replicas.append(Timed(case.replica(), index, core, on_step))
        return replicas[-1]

    fleet_config = FleetConfig(
        replicas=2 if case.gpu is None else 1,
        canary_tolerance=tolerance_of(case.checkpoint, case.dtype),
        on_update="finish" if case.transport == "adapter" else "continue",
    )
    floor = Floor(case.size_bytes)
    rounds = []
    with workspace() as folder:
        devices = () if case.gpu is None else (case.gpu,)
        process = LearnerProcessConfig(module="algo.learner", ranks=case.ranks, devices=devices)
        async with (
            LearnerProcess(process, folder, folder / "learner.log") as learner,
            Fleet(fleet_config, make, RoundRobin(), Timeline(), CANARY) as fleet,
        ):
            ready, canary = await learner.configure(case.configure(folder))
            await fleet.update_weights(PublishedWeights(ready.weights, 0, canary))
            update = Update(case, learner, fleet, replicas, ready.weights)
            for number in range(case.rounds + 1):
                say(f"{case.size} by {case.transport}, round {number} of {case.rounds}")
                rounds.append(figures(await update.next(), await update.stall(), floor.measure()))
    return rounds[1:]


def figures(update: dict[str, float], stall: dict[str, float], floor: dict[str, float]) -> dict[str, float]:
    return {**update, **stall, **floor, "over_copy": update["total_s"] / floor["copy_s"]}


class Update:
    """Brings one version after the other to the replicas."""

    def __init__(
        self, case: Case, learner: LearnerProcess, fleet: Fleet, replicas: Sequence[Timed], newest: str
    ) -> None:
        """newest: address of the weights that the replicas have."""
        self.case, self.learner, self.fleet, self.replicas = case, learner, fleet, replicas
        self.version, self.newest = 0, newest

    async def next(self) -> dict[str, float]:
        """Trains, publishes and loads a version. Returns the seconds of its parts."""
        self.version += 1
        trained, canary = await self.learner.train(random_batch(self.version), self.version)
        before, self.newest = self.newest, trained.weights
        started = time.perf_counter()
        path, moved_bytes = self.newest, self.case.size_bytes
        if self.case.transport == "delta":
            path, moved_bytes = await asyncio.to_thread(by_delta, Path(before), Path(self.newest))
        elif self.case.transport == "adapter":
            moved_bytes = size_of(Path(self.newest))
        delta_s = time.perf_counter() - started
        await self.fleet.update_weights(PublishedWeights(path, self.version, canary))
        update_s = time.perf_counter() - started
        metrics = trained.metrics
        return {
            "moved_bytes": float(moved_bytes),
            "publish_s": metrics["publish_s"],
            "learner_canary_s": metrics["canary_s"],
            "delta_s": delta_s if self.case.transport == "delta" else 0.0,
            "load_s": max(replica.load_s for replica in self.replicas),
            "canary_s": max(replica.canary_s for replica in self.replicas),
            "total_s": metrics["publish_s"] + metrics["canary_s"] + update_s,
        }

    async def stall(self) -> dict[str, float]:
        """Returns how much longer than usual a request that is under way waits for a token while an update comes."""
        sampling = Sampling(
            max_tokens=UNDER_WAY, temperature=1.0, seed=None, stop_token_ids=(), ignore_eos=True, bundle=1
        )
        key, begun = self.fleet.new_key(), asyncio.Event()
        came: list[float] = []

        async def request() -> None:
            async for _, delta in self.fleet.turn(key, 0, [3, 4, 5, 6], sampling):
                came.append(time.perf_counter())
                if len(came) == 20 or delta.finish:
                    begun.set()
            self.fleet.trajectory_ended(key, len(came), finished=True)

        async with asyncio.TaskGroup() as group:
            group.create_task(request(), name="request")
            await begun.wait()
            await self.next()
        waits_s = [later - earlier for earlier, later in itertools.pairwise(came)]
        return {"stall_s": max(waits_s) - statistics.median(waits_s)}


def size_of(path: Path) -> int:
    return path.stat().st_size


def by_delta(before: Path, newest: Path) -> tuple[str, int]:
    """Returns the new weights, made of the old ones and a delta, and its bytes; all weights if a delta does not pay."""
    delta, made = newest.with_suffix(".delta"), newest.with_name("made.safetensors")
    digest = deltas.write(before, newest, delta)
    if digest is None:
        return str(newest), newest.stat().st_size
    made.unlink(missing_ok=True)  # replicas may still map the one before
    info = FileInfo(name=newest.name, size_bytes=newest.stat().st_size, sha256=digest)
    deltas.apply(before, delta, info, made)
    return str(made), delta.stat().st_size


def checkpoint_of(size: str, folder: Path) -> tuple[Path, int]:
    """Makes a random checkpoint in a process of its own. Returns its folder and the bytes of its weights."""
    path = folder / size
    code = f"from bench.benches.weights import write_model; write_model({str(path)!r}, {size!r})"
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)
    return path, sum(file.stat().st_size for file in path.glob("*.safetensors"))


def measure(options: Options, keep: Keep) -> None:
    prepare_environment()
    with tempfile.TemporaryDirectory() as folder:
        for size in options.sizes:
            path, size_bytes = checkpoint_of(size, Path(folder))
            for transport in options.transports:
                case = Case(
                    size=size,
                    transport=transport,
                    ranks=options.ranks,
                    rounds=options.rounds,
                    checkpoint=path,
                    size_bytes=size_bytes,
                    gpu=options.device,
                )
                for values in asyncio.run(measured(case)):
                    keep({f"{size}/{transport}": values})


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("total_s", "stall_s", "over_copy"),
    quick={"rounds": "3", "sizes": "tiny"},
)
