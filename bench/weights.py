"""Weight sync: how long from the learner's last optimizer step until all replicas serve the new weights?

    python -m bench.weights [--quick] [--sizes tiny,97m,600m] [--transfers shm,gloo] [--ranks 1]

For each size a random Qwen3, its real learner and two real vLLM engines on the CPU. A round is a training step without
data: the learner publishes its weights as a new version, and both engines load them and pass the canary. No request is
in flight. The floor is a plain copy of the same bytes in the same round, with a thread per core: into memory that was
written before, and into fresh memory, whose pages the kernel has yet to give. `copy_floor_ratio_<transfer>_<size>` is
the median of a round's whole time over its first floor; `load_ratio` that of the engines' part over two copies at once,
since each engine has to have its own.

tiny and 97m are fp32; 600m is bf16 for the engines, fp32 in the learner.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from algo.learner_config import LearnerConfig
from engine import canary
from engine.fleet import Fleet, FleetConfig, Weights
from engine.link import Configure, LearnerProcess, LearnerProcessConfig
from engine.replica import Replica, ReplicaConfig
from engine.rivals import RoundRobin
from engine.trace import Timeline
from engine.types import Batch, Floats
from engine.workspace import workspace

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab": 4096, "hidden": 256, "inner": 768, "layers": 3, "heads": 8, "kv_heads": 2, "head": 32},
    "97m": {"vocab": 28032, "hidden": 768, "inner": 2048, "layers": 12, "heads": 12, "kv_heads": 4, "head": 64},
    "600m": {"vocab": 151936, "hidden": 1024, "inner": 3072, "layers": 28, "heads": 16, "kv_heads": 8, "head": 128},
}
DTYPES = {"tiny": "float32", "97m": "float32", "600m": "bfloat16"}
TRANSFERS = ("shm", "gloo")
CANARY = [[3 + 7 * number + index for index in range(8)] for number in range(2)]
PARTS = ("publish_s", "learner_canary_s", "load_s", "canary_s", "rest_s", "total_s", "copy_s", "fresh_copy_s")


class Timed(Replica):
    """A replica that tells how long its last update and canary took."""

    load_s = canary_s = 0.0

    async def update_weights(self, path: str, version: int) -> None:
        started = time.perf_counter()
        await super().update_weights(path, version)
        self.load_s = time.perf_counter() - started

    async def logprobs(self, sequences: Any) -> Floats:
        started = time.perf_counter()
        found = await super().logprobs(sequences)
        self.canary_s = time.perf_counter() - started
        return found


def write_model(folder: Path, size: str) -> int:
    """A random checkpoint (in its own process: the node must not run torch before it forks); its parameters."""
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
    torch.set_default_dtype(getattr(torch, DTYPES[size]))
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def empty(step: int) -> Batch:
    none = {"token_ids_N": np.int32, "sampled_N": np.bool_, "logprobs_N": np.float32, "versions_N": np.int32}
    none |= {"lengths_B": np.int32, "advantages_B": np.float32}
    return Batch(step=step, **{name: np.zeros(0, dtype) for name, dtype in none.items()})


class Floor:
    """Copies of as many bytes as the weights have, a thread per core."""

    def __init__(self, size_bytes: int) -> None:
        self.source = np.ones(size_bytes, np.uint8)
        self.target = np.ones(size_bytes, np.uint8)

    def seconds(self, target: NDArray[np.uint8]) -> float:
        threads = len(os.sched_getaffinity(0))
        bounds = [len(self.source) * index // threads for index in range(threads + 1)]
        parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda part: None, parts))  # the threads are up
            started = time.perf_counter()
            list(pool.map(lambda part: np.copyto(target[part], self.source[part]), parts))
            return time.perf_counter() - started

    def measure(self) -> dict[str, float]:
        return {"copy_s": self.seconds(self.target), "fresh_copy_s": self.seconds(np.empty_like(self.source))}


async def rounds(size: str, transfer: str, checkpoint: Path, size_bytes: int, args: argparse.Namespace) -> Any:
    """Part -> its seconds in each round (the first round, which also allocates, is left out)."""
    seconds: dict[str, list[float]] = defaultdict(list)
    config = ReplicaConfig(
        checkpoint=str(checkpoint),
        max_model_len=256,
        max_num_seqs=8,
        kv_blocks=32,
        dtype=DTYPES[size],
        weight_transfer=transfer,
    )
    tolerance = canary.tolerance(DTYPES[size])
    replicas: list[Timed] = []

    def make(index: int, core: int | None, on_step: Any) -> Timed:
        replicas.append(Timed(config, index, core, on_step))
        return replicas[-1]

    floor = Floor(size_bytes)
    with workspace() as folder:
        process = LearnerProcessConfig(module="algo.learner", ranks=args.ranks)
        async with (
            LearnerProcess(process, folder, folder / "learner.log") as learner,
            Fleet(FleetConfig(replicas=2, canary_tolerance=tolerance), make, RoundRobin(), Timeline(), CANARY) as fleet,
        ):
            learner_config = LearnerConfig(
                threads=max(1, 2 // args.ranks), weight_transfer=transfer, weights_dtype=DTYPES[size]
            )
            message = Configure(
                checkpoint=str(checkpoint),
                learner=dataclasses.asdict(learner_config),
                canary=CANARY,
                weights_dir=str(folder),
                seed=1,
            )
            ready, logprobs = await learner.configure(message)
            await fleet.update_weights(Weights(ready.weights, 0, logprobs))
            for version in range(1, args.rounds + 1):
                started = time.perf_counter()
                trained, logprobs = await learner.train(empty(version), version)
                await fleet.update_weights(Weights(trained.weights, version, logprobs))
                total = time.perf_counter() - started
                found = {
                    "publish_s": trained.metrics["publish_s"],
                    "learner_canary_s": trained.metrics["canary_s"],
                    "load_s": max(replica.load_s for replica in replicas),
                    "canary_s": max(replica.canary_s for replica in replicas),
                }
                found |= {"rest_s": total - sum(found.values()), "total_s": total} | floor.measure()
                if version > 1:
                    for name, value in found.items():
                        seconds[name].append(value)
    return seconds
