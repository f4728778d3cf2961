"""Two GPUs: how long weights take from a learner to a replica, and how long it is replaced if it dies in a pull."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

from algo.learner.config import LearnerConfig
from bench.benches.weights import CANARY, random_batch
from bench.measuring.terminal import say
from engine.balancing.round_robin import RoundRobin
from engine.fleet.canary import tolerance_of
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.learner.messages import Configure
from engine.learner.process import LearnerProcess, LearnerProcessConfig
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.replica.replica import Replica
from engine.run.workspace import workspace
from engine.telemetry.timeline import Timeline
from engine.types import Floats, PublishedWeights

INTO_A_PULL_S = 0.2  # a replica that is stopped takes part no more, and is killed so much later


class _Victim(Replica):
    """Dies in its pull of one version; afterwards it says when its engine has answered the canary of a version."""

    fatal_version = -1
    died_at = 0.0
    serves: asyncio.Queue[tuple[int, float]] = asyncio.Queue()

    async def update_weights(self, path: str, version: int) -> None:
        if version == _Victim.fatal_version:
            _Victim.fatal_version = -1
            _Victim.died_at = time.perf_counter()
            os.kill(self.pid, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(INTO_A_PULL_S, os.kill, self.pid, signal.SIGKILL)
        await super().update_weights(path, version)

    async def logprobs(self, sequences: Any) -> Floats:
        logprobs_T = await super().logprobs(sequences)
        self.serves.put_nowait((self.version, time.perf_counter()))
        return logprobs_T


async def pulled(checkpoint: Path, *, on_gpu: bool) -> dict[str, float]:
    """Returns the seconds of an undisturbed update, and those from a replica's death in the next one until another
    serves that version. On the CPU weights travel by gloo, on GPUs 0 (learner) and 1 (replica) by nccl.
    """
    prepare_environment()
    vocabulary = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    canary_ids = [[id % vocabulary for id in ids] for ids in CANARY]
    transfer = "nccl" if on_gpu else "gloo"
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if on_gpu else "float32"
    config = ReplicaConfig(
        checkpoint=str(checkpoint),
        max_model_len=256,
        kv_blocks=None if on_gpu else 32,
        dtype=dtype,
        devices=(1,) if on_gpu else (),
        weight_transfer=transfer,
    )
    learner_config = LearnerConfig(
        weight_transfer=transfer,
        dtype=dtype,
        weights_dtype=dtype,
        device="cuda" if on_gpu else "cpu",
        lr=1e-6,
        warmup_steps=0,
        mismatch_tolerance=None,
    )
    fleet_config = FleetConfig(replicas=1, canary_tolerance=tolerance_of(checkpoint, dtype))
    with workspace() as folder:
        process = LearnerProcessConfig(module="algo.learner", devices=(0,) if on_gpu else ())

        def make(index: int, core: int | None, on_step: Any) -> _Victim:
            return _Victim(config, index, core, on_step)

        async with (
            LearnerProcess(process, folder, folder / "learner.log") as learner,
            Fleet(fleet_config, make, RoundRobin(), Timeline(), canary_ids, say) as fleet,
        ):
            configure = Configure(
                checkpoint=str(checkpoint),
                learner=dataclasses.asdict(learner_config),
                canary=canary_ids,
                weights_dir=str(folder),
                seed=1,
            )
            ready, canary = await learner.configure(configure)
            await fleet.update_weights(PublishedWeights(ready.weights, 0, canary))
            trained, canary = await learner.train(random_batch(1, vocabulary), 1)
            began = time.perf_counter()
            await fleet.update_weights(PublishedWeights(trained.weights, 1, canary))
            update_s = time.perf_counter() - began
            trained, canary = await learner.train(random_batch(2, vocabulary), 2)
            _Victim.fatal_version = 2
            await fleet.update_weights(PublishedWeights(trained.weights, 2, canary))
            while (served := await _Victim.serves.get())[0] != 2:
                pass
            return {"update_s": update_s, "replaced_s": served[1] - _Victim.died_at, "deaths": fleet.deaths}
