"""A replica of two processes behind a real learner: weights that change, one of the two killed, nothing left behind.

Run by test_tensor_parallel.py: `python -m tests.support.tensor_parallel`. Prints one JSON object.
"""

import asyncio
import json
import os
import sys

import psutil

from engine.balancing.round_robin import RoundRobin
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.learner.process import LearnerProcess, LearnerProcessConfig
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.replica.port import Sampling
from engine.replica.replica import Replica
from engine.run.workspace import workspace
from engine.telemetry.timeline import Timeline
from engine.types import PublishedWeights
from tests.support.first_weights import CANARY, CHECKPOINT, load_first


class Noted(Replica):
    """Says which canaries were asked of which process."""

    asked: list = []  # noqa: RUF012 (of all replicas together)
    came = asyncio.Event()

    async def logprobs(self, sequences):
        result = await super().logprobs(sequences)
        Noted.asked.append((self.version, self.pid))
        Noted.came.set()
        return result


def shared_memory():
    return {name for name in os.listdir("/dev/shm") if not name.startswith("rocstar-")}


def workers(replica):
    """Returns the processes that compute: those of vLLM below the engine's, without Python's tracker."""
    below = psutil.Process(replica.pid).children()
    return [child for child in below if "Worker" in " ".join(child.cmdline())]


async def sampled(replica, name):
    """Samples a request. Returns its ids, and how far its log-probabilities are from what the canary's way gives."""
    sampling = Sampling(max_tokens=8, temperature=1.0, seed=1, stop_token_ids=(), ignore_eos=True)
    ids, logprobs = [5, 6, 7, 8], []
    async for delta in replica.generate([*ids], sampling, name):
        ids += delta.token_ids
        logprobs += delta.logprobs
    scored = (await Replica.logprobs(replica, [ids]))[3:]
    return ids, float(abs(scored - logprobs).max())


async def main(transfer):
    from algo.learner.config import LearnerConfig
    from tests.support.algo_fakes import batch

    before, result = shared_memory(), {}
    config = ReplicaConfig(
        checkpoint=CHECKPOINT, max_model_len=256, kv_blocks=16, weight_transfer=transfer, tensor_parallel=2
    )
    settings = LearnerConfig(threads=1, weight_transfer=transfer, lr=3e-3, warmup_steps=0)
    made = []

    def make(index, core, on_step):
        made.append(Noted(config, index, core, on_step))
        return made[-1]

    with workspace() as work:
        learner = LearnerProcess(LearnerProcessConfig(module="algo.learner"), work, work / "log")
        fleet = Fleet(FleetConfig(replicas=1, watch_s=0.2), make, RoundRobin(), Timeline(), CANARY)
        async with learner, fleet:
            _, canary = await load_first(learner, fleet, settings, work)
            [first] = made
            computing = workers(first)
            result["workers"] = len(computing)
            result["named"] = sorted(shared_memory() - before)
            result["open_to_others"] = [
                str(socket.laddr)
                for process in (psutil.Process(first.pid), *computing)
                for socket in process.net_connections("inet")
                if socket.status == psutil.CONN_LISTEN and socket.laddr.ip != "127.0.0.1"
            ]
            result["sessions"] = sum(os.getsid(process.pid) == process.pid for process in computing)
            trained, moved = await learner.train(batch(12, step=1), 1)
            await fleet.update_weights(PublishedWeights(trained.weights, 1, moved))
            result["moved"] = float(abs(moved - canary).max())
            result["canary_max_abs"] = fleet.canary_max_abs
            ids, result["off"] = await sampled(first, "before")

            Noted.came.clear()
            computing[1].kill()
            await Noted.came.wait()  # of the replacement
            await asyncio.sleep(0)
            result["deaths"] = fleet.deaths
            result["asked"] = [version for version, _ in Noted.asked]
            result["processes"] = len({pid for _, pid in Noted.asked})
            _, alive = psutil.wait_procs(computing, timeout=10)
            result["left"] = [process.name() for process in alive]
            result["same"] = (await sampled(made[-1], "after"))[0] == ids
            computing = workers(made[-1])
        _, alive = psutil.wait_procs(computing, timeout=10)
        result["left"] += [process.name() for process in alive]
    result["shared_memory"] = sorted(shared_memory() - before)
    print(json.dumps(result))


if __name__ == "__main__":
    prepare_environment()
    asyncio.run(main(sys.argv[1]))
