"""An engine that scores sequences, alone, beside others, from what it has cached, and after a kill. It asserts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import numpy as np

from engine.balancing.round_robin import RoundRobin
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.replica.replica import Replica
from engine.telemetry.timeline import Timeline
from tests.support.paths import TINY

CONFIG = ReplicaConfig(checkpoint=str(TINY), max_model_len=300)


def sequences(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(5, 400, length).tolist() for length in lengths]


async def refusal(scoring):
    try:
        await scoring
    except ValueError as error:
        return str(error)
    return "it was scored"


async def cached():
    replica = Replica(CONFIG, 0, None, lambda *_: None)
    await replica.start()
    try:
        whole = sequences(230, 200, 97)
        alone = [await replica.score(ids, 1, 3) for ids in whole]
        for ids, scores in zip(whole, alone, strict=True):
            np.testing.assert_array_equal(scores.logprobs_T, await replica.logprobs([ids]))
            ids_TK, logprobs_TK = scores.top_TK
            assert (np.diff(logprobs_TK, axis=1) <= 0).all(), "the likeliest comes first"
            own = ids_TK == np.asarray(ids[1:])[:, None]
            np.testing.assert_array_equal(logprobs_TK[own], scores.logprobs_T[own.any(1)])
            half = len(ids) // 2
            for start, end in ((half // 2, half), (half, len(ids)), (half, len(ids)), (1, half)):
                # The first reads nothing, the second what the first has left; the others find more than they may read.
                part = await replica.score(ids[:end], start, 3)
                np.testing.assert_array_equal(part.logprobs_T, scores.logprobs_T[start - 1 : end - 1])
                np.testing.assert_array_equal(part.top_ids, ids_TK[start - 1 : end - 1].ravel())
        together = await asyncio.gather(*(replica.score(ids, 1, 3) for ids in sequences(230, 200, 97)))
        for one, other in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one.logprobs_T, other.logprobs_T)
        for wrong in ([1, 2, 99_999], [1] * 400):
            assert "refuses the sequence" in await refusal(replica.score(wrong, 1))
        assert not replica.died.is_set()
    finally:
        await replica.shutdown()


async def killed():
    made = []

    def make(index, core, on_step):
        made.append(Replica(CONFIG, index, None, on_step))
        return made[-1]

    [ids] = sequences(200)
    async with Fleet(FleetConfig(replicas=1), make, RoundRobin(), Timeline(), note=lambda line: None) as fleet:
        before = await fleet.score(ids, 1)
        many = [asyncio.create_task(fleet.score(ids, 1)) for _ in range(8)]
        await asyncio.sleep(0)
        os.kill(made[0].pid, signal.SIGKILL)
        for scores in await asyncio.gather(*many):
            np.testing.assert_array_equal(scores.logprobs_T, before.logprobs_T)
        assert len(made) == 2


if __name__ == "__main__":
    prepare_environment()
    asyncio.run({"cached": cached, "killed": killed}[sys.argv[1]]())
