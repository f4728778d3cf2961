"""Real learner, two real engines, one transport: weights that change, a replica killed in an update, a broken update.

Run by test_weight_sync.py: `python -m tests.support.weight_sync TRANSFER RANKS`. Prints one JSON object.
"""

import asyncio
import itertools
import json
import os
import signal
import sys

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


class Watched(Replica):
    """Says what it was given, and whether its canary was asked; a victim is killed while it loads."""

    given: list = []  # noqa: RUF012 (of all replicas together)
    victim: int | None = None
    came = asyncio.Event()
    sent: set = set()  # noqa: RUF012 (canary sequences that the engine had when it was let go)

    async def update_weights(self, path, version):
        if Watched.victim == self.index:
            Watched.victim = None
            os.kill(self.pid, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(0.2, os.kill, self.pid, signal.SIGKILL)
        await super().update_weights(path, version)

    async def start(self):
        await super().start()
        core, sent = self._engine.engine_core, []
        add, resume = core.add_request_async, core.resume_scheduler_async

        async def counted_add(request):
            sent.append(request)
            await add(request)

        async def counted_resume():
            Watched.sent.add(len(sent))
            sent.clear()
            await resume()

        core.add_request_async, core.resume_scheduler_async = counted_add, counted_resume

    async def logprobs(self, sequences):
        result = await super().logprobs(sequences)
        Watched.given.append((self.index, self.version, self.pid))
        Watched.came.set()
        return result


async def given(count):
    """Until so many loads and canaries have passed."""
    while len(Watched.given) < count:
        Watched.came.clear()
        await Watched.came.wait()


async def across(replica, update):
    """A request that an update interrupts, its tokens held back where they may be. By version: how many tokens are said
    to be of it, and how far their log-probabilities are from those that the last version gives them.
    """
    sampling = Sampling(
        max_tokens=200, temperature=1.0, seed=1, stop_token_ids=(), ignore_eos=True, deliver_at=frozenset()
    )
    ids, logprobs = [5, 6, 7, 8], []
    async with asyncio.TaskGroup() as group:
        async for delta in replica.generate([*ids], sampling, "across"):
            if len(logprobs) < 20 <= len(logprobs) + len(delta.token_ids):
                group.create_task(update, name="update")
            ids += delta.token_ids
            logprobs += delta.logprobs
    scored = (await Replica.logprobs(replica, [ids]))[3:]  # it is no canary
    off = abs(scored - logprobs)
    return {version: (end - begin, float(off[begin:end].max())) for version, begin, end in delta.spans}


async def main(transfer, ranks):
    """With shm the engines load as vLLM does it, with gloo directly (as the quick start does, with shm)."""
    import engine.replica.cpu_weight_loader

    if transfer == "shm":
        engine.replica.cpu_weight_loader.MODELS = ()  # before the engines are forked
    from algo.learner.config import LearnerConfig
    from tests.support.algo_fakes import batch

    result = {}
    config = ReplicaConfig(checkpoint=CHECKPOINT, max_model_len=256, kv_blocks=16, weight_transfer=transfer)
    learner_config = LearnerConfig(threads=1, weight_transfer=transfer, lr=3e-3, warmup_steps=0)

    def make(index, core, on_step):
        return Watched(config, index, core, on_step)

    with workspace() as work:
        learner = LearnerProcess(LearnerProcessConfig(module="algo.learner", ranks=ranks), work, work / "log")
        fleet = Fleet(FleetConfig(watch_s=0.2), make, RoundRobin(), Timeline(), CANARY)
        async with learner, fleet:
            _, canary = await load_first(learner, fleet, learner_config, work)
            canaries = [canary]
            for version in (1, 2, 3):
                trained, canary = await learner.train(batch(12, step=version), version)
                canaries.append(canary)
                Watched.victim = 1 if version == 3 else None
                await fleet.update_weights(PublishedWeights(trained.weights, version, canary))
            result["moved"] = [float(abs(a - b).max()) for a, b in itertools.pairwise(canaries)]
            await given(8)  # the replaced one too has the weights and passed
            result["given"] = sorted((index, version) for index, version, _ in Watched.given)
            pids = {pid for _, _, pid in Watched.given}
            result["processes"] = len(pids)

            replica = fleet._supervisor.live[0]
            try:
                await replica.update_weights(trained.weights + "0", 4)
            except ReplicaDied as error:
                result["broken"] = str(error)[:60]
            await given(9)
            result["replaced"] = Watched.given[-1][:2]
            result["sent"] = sorted(Watched.sent)
            trained, canary = await learner.train(batch(12, step=4), 4)
            update = fleet.update_weights(PublishedWeights(trained.weights, 4, canary))
            result["across"] = await across(fleet._supervisor.live[1], update)
            result["last"] = sorted(Watched.given[-2:])
            result["last"] = [entry[:2] for entry in result["last"]]
            result["canary_max_abs"] = fleet.canary_max_abs
            result["deaths"] = fleet.deaths
            result["files"] = sorted(name for name in os.listdir(work) if "weights" in name)
        result["mapped_anew"], result["neighbours_joined"] = mappings(work)  # after the engines were forked
    print(json.dumps(result))


def mappings(folder):
    """Which files are mapped anew: two of them in turn, then a third, then the one it replaced. And what is in them."""
    import torch
    from safetensors.torch import load_file, save_file

    from engine.replica.cpu_weight_loader import _joined
    from engine.replica.weight_transfer import ShmWeightTransfer

    transfer = object.__new__(ShmWeightTransfer)
    files = [folder / name for name in "abc"]
    for number, file in enumerate(files):
        save_file({"w": torch.full((2, 4), float(number)), "v": torch.ones(3, 4)}, file)
    seen, anew = [], []
    for number in (0, 1, 0, 1, 2, 1, 0):
        weights = transfer._map(files[number])
        assert all(torch.equal(weights[name], weight) for name, weight in load_file(files[number]).items())
        anew.append(not any(weights is other for other in seen))
        seen.append(weights)
    parts = [weights["v"], weights["w"]]
    assert torch.equal(_joined(parts), torch.cat(parts))
    return anew, _joined(parts).data_ptr() == parts[0].data_ptr()


if __name__ == "__main__":
    prepare_environment()
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
