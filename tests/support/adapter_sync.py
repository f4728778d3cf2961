"""Real learner of adapters, two real engines: versions side by side, and none pauses for a new one.

Run by test_adapter_sync.py: `python -m tests.support.adapter_sync`. Prints one JSON object.
"""

import asyncio
import json
import os

from engine.balancing.round_robin import RoundRobin
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.learner.process import LearnerProcess, LearnerProcessConfig
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.replica.port import ReplicaDied, Sampling
from engine.replica.replica import Replica
from engine.run.workspace import workspace
from engine.telemetry.timeline import Timeline
from engine.types import PublishedWeights
from tests.support.first_weights import CANARY, CHECKPOINT, load_first

RANK, SERVED, TOKENS = 4, 2, 120


class Unpaused(Replica):
    """Counts how often its scheduler was paused."""

    pauses = 0

    async def _pause(self, *, clear_cache):
        Unpaused.pauses += 1
        await super()._pause(clear_cache=clear_cache)


async def sampled(replica, version, name, *, begun=None):
    """(ids, log-probabilities, versions said) of a request under a version."""
    sampling = Sampling(
        max_tokens=TOKENS, temperature=1.0, seed=1, stop_token_ids=(), ignore_eos=True, version=version, bundle=1
    )
    ids, logprobs, spans = [5, 6, 7, 8], [], ()
    async for delta in replica.generate([*ids], sampling, name):
        ids += delta.token_ids
        logprobs += delta.logprobs
        spans = delta.spans or spans
        if begun is not None and len(logprobs) >= 5:
            begun.set()
    return ids, logprobs, [list(span) for span in spans]


async def off(replica, version, ids, logprobs):
    """How far log-probabilities are from those of a version: that of the newest is what a replica's canary tells."""
    before, replica.version = replica.version, version
    scored = (await replica.logprobs([ids]))[3:]
    replica.version = before
    return float(abs(scored - logprobs).max())


def size_of(path):
    return os.path.getsize(path)


async def main():
    from algo.learner.config import LearnerConfig
    from tests.support.algo_fakes import batch

    result = {}
    config = ReplicaConfig(
        checkpoint=CHECKPOINT,
        max_model_len=256,
        kv_blocks=32,
        weight_transfer="adapter",
        lora_rank=RANK,
        lora_targets=LearnerConfig().lora_targets,
        adapters=SERVED,
    )
    settings = LearnerConfig(
        threads=1, weight_transfer="adapter", lora_rank=RANK, lr=3e-2, warmup_steps=0, mismatch_tolerance=None
    )

    def make(index, core, on_step):
        return Unpaused(config, index, core, on_step)

    with workspace() as work:
        learner = LearnerProcess(LearnerProcessConfig(module="algo.learner", ranks=2), work, work / "log")
        fleet = Fleet(FleetConfig(watch_s=0.2, on_update="finish"), make, RoundRobin(), Timeline(), CANARY)
        async with learner, fleet:
            weights, _ = await load_first(learner, fleet, settings, work)
            result["bytes"] = size_of(weights)
            replica = fleet._supervisor.live[0]

            async def update(version):
                trained, canary = await learner.train(batch(12, step=version), version)
                await fleet.update_weights(PublishedWeights(trained.weights, version, canary))

            begun = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                across = group.create_task(sampled(replica, 0, "across", begun=begun))
                await begun.wait()
                result["ended_before_update"] = across.done()
                await update(1)
                new = group.create_task(sampled(replica, 1, "new"))
                old = group.create_task(sampled(replica, 0, "old"))
            for name, task, version in (("across", across, 0), ("new", new, 1), ("old", old, 0)):
                ids, logprobs, spans = task.result()
                own, other = [await off(replica, each, ids, logprobs) for each in (version, 1 - version)]
                result[name] = {"spans": spans, "own": own, "other": other}

            begun.clear()
            async with asyncio.TaskGroup() as group:
                kept = group.create_task(sampled(replica, 1, "kept", begun=begun))
                await begun.wait()
                await update(2)
                await update(3)
                result["while_used"] = sorted(replica._adapters)
            result["kept"] = kept.result()[2]
            await update(4)
            result["at_last"] = sorted(replica._adapters)
            result["gone"] = (await sampled(replica, 0, "gone"))[2]
            result["files"] = sorted(name for name in os.listdir(work) if "weights" in name)
            result["canary_max_abs"] = fleet.canary_max_abs
            result["pauses"] = Unpaused.pauses

            fleet._supervisor.live[1].kill()
            while fleet.live != [0, 1] or fleet.deaths < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            result["replaced"] = sorted(fleet._supervisor.live[1]._adapters)
            try:
                await replica.update_weights(f"{CHECKPOINT}/model.safetensors", 5)
            except ReplicaDied as error:
                result["broken"] = str(error)
    print(json.dumps(result))


if __name__ == "__main__":
    prepare_environment()
    asyncio.run(main())
