"""Real learner, real engine, a mixture of experts: weights that change, a wrong expert, and the exported checkpoint.

Run by test_moe_sync.py: `python -m tests.support.moe_sync CHECKPOINT TRANSFER RANKS`. Prints one JSON object.
"""

import asyncio
import itertools
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from engine.balancing.round_robin import RoundRobin
from engine.fleet.canary import CanaryFailed, compare, tolerance_of
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.learner.messages import Configure
from engine.learner.process import LearnerProcess, LearnerProcessConfig
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.replica.replica import Replica
from engine.run.workspace import workspace
from engine.telemetry.timeline import Timeline
from engine.types import PublishedWeights

CANARY = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]
APART = r"model\.layers\.1\..*\.experts\.{expert}\.(down_proj|w2)\.weight"
TOGETHER = "model.layers.1.mlp.experts.down_proj"  # of all experts, as gpt-oss has it


async def main(checkpoint, transfer, ranks):
    from algo.learner.config import LearnerConfig
    from tests.support.algo_fakes import batch

    result = {}
    learner_config = LearnerConfig(threads=1, weight_transfer=transfer, lr=3e-3, warmup_steps=0)
    tolerance = tolerance_of(checkpoint, "float32")

    def make(index, core, on_step):
        config = ReplicaConfig(checkpoint=checkpoint, max_model_len=256, kv_blocks=64, weight_transfer=transfer)
        return Replica(config, index, core, on_step)

    with workspace() as work:
        learner = LearnerProcess(LearnerProcessConfig(module="algo.learner", ranks=ranks), work, work / "log")
        fleet = Fleet(FleetConfig(replicas=1, canary_tolerance=tolerance), make, RoundRobin(), Timeline(), CANARY)
        async with learner, fleet:
            ready, canary = await learner.configure(
                Configure(
                    checkpoint=checkpoint, learner=asdict(learner_config), canary=CANARY, weights_dir=str(work), seed=3
                )
            )
            weights = PublishedWeights(ready.weights, 0, canary, ready.canary_further)
            await fleet.update_weights(weights)
            versions, unreached = [weights], []
            for version in (1, 2):
                trained, canary = await learner.train(batch(12, step=version), version)
                weights = PublishedWeights(trained.weights, version, canary, trained.canary_further)
                await fleet.update_weights(weights)
                versions.append(weights)
                unreached.append(trained.metrics["canary_unreached"])
            result["canary_max_abs"] = fleet.canary_max_abs
            result["moved"] = [
                float(abs(one.canary[:8] - other.canary[:8]).max()) for one, other in itertools.pairwise(versions)
            ]
            result["further"] = [len(each.further) for each in versions]
            result["unreached"] = unreached
            sequences = [*CANARY, *weights.further]
            if transfer == "shm":
                result["noticed"] = await wrong_experts(fleet._supervisor.live[0], weights, sequences, tolerance)
            await learner.save(work / "exported")
        exported = ReplicaConfig(checkpoint=str(work / "exported"), max_model_len=256, kv_blocks=64)
        replica = Replica(exported, 0, None, lambda *_: None)
        await replica.start()
        try:
            found = await replica.logprobs(sequences)
        finally:
            await replica.shutdown()
        names = json.loads((work / "exported" / "config.json").read_text())
        result["exported"] = compare(0, found, weights, None).mean_abs
        result["dtype"] = names["dtype"]
    print(json.dumps(result))


async def wrong_experts(replica, weights, sequences, tolerance):
    """Loads the published file with one expert of layer 1 zeroed, for two experts: which of them the canary notices."""
    from safetensors.torch import load_file, save_file

    noticed = []
    for expert in (0, 3):
        tensors = load_file(weights.path)
        if TOGETHER in tensors:
            tensors[TOGETHER][expert] = 0
        else:
            [name] = [name for name in tensors if re.fullmatch(APART.format(expert=expert), name)]
            tensors[name] = tensors[name] * 0
        path = Path(weights.path).with_name(f"wrong-{expert}.safetensors")
        save_file(tensors, path, metadata={"format": "pt"})
        await replica.update_weights(str(path), 10 + expert)
        try:
            compare(0, await replica.logprobs(sequences), weights, tolerance)
        except CanaryFailed:
            noticed.append(expert)
        path.unlink()
    await replica.update_weights(weights.path, 20)
    compare(0, await replica.logprobs(sequences), weights, tolerance)
    return noticed


if __name__ == "__main__":
    prepare_environment()
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
