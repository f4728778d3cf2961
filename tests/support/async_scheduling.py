"""Weight updates in the middle of requests, and a request that is left, on an engine that schedules steps ahead.

Run by test_async_scheduling.py: `python -m tests.support.async_scheduling`. Prints one JSON object. A stub worker
that answers later and computes nothing stands for the model; all else is real.
"""

import asyncio
import json
from contextlib import aclosing
from dataclasses import dataclass

from bench.benches.loop.engines import StubConfig, asynchronous_scheduling
from bench.benches.loop.script import Script
from engine.replica.config import prepare_environment
from engine.replica.port import Sampling
from engine.replica.replica import Replica
from tests.support.paths import TINY

REQUESTS, UPDATES = 24, 6
EARLY = 45  # a token that leaves the engine at once; others leave in bundles
SCRIPT = Script(step_s=0.01, tokens=120, calls=0, filler=list(range(40, 60)), call=[20], answer=[21], end=2, ends=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(StubConfig):
    def arguments(self, index):
        return StubConfig.arguments(self, index) | {
            "worker_cls": "tests.support.versioned_worker.VersionedWorker",
            "max_num_batched_tokens": 256,  # long prompts are computed in several steps
        }


def prompt(number):
    return [5] * (4 + 15 * number)


def sampling(seed):
    stop, early = (SCRIPT.end,), frozenset({EARLY})
    return Sampling(max_tokens=400, temperature=1.0, seed=seed, stop_token_ids=stop, deliver_at=early)


async def request(replica, number):
    """Returns what is wrong with a request, and the number of versions that sampled it."""
    tokens, sampled_by, parts, spans = [], [], 0, ()
    async for delta in replica.generate(prompt(number), sampling(number), f"request-{number}"):
        tokens += delta.token_ids
        sampled_by += [round(-logprob) for logprob in delta.logprobs]
        spans = delta.spans
        parts += 1
    reported = [version for version, start, end in spans for _ in range(start, end)]
    wrong = {
        "tokens": tokens != SCRIPT.turn(prompt(number), number),
        "versions": reported != sampled_by,
        "not bundled": parts > len(tokens) / 2,
    }
    return [what for what, is_so in wrong.items() if is_so], len(set(sampled_by))


async def main():
    samples = []
    config = Config(checkpoint=str(TINY), max_model_len=512, kv_blocks=256, script=SCRIPT)
    replica = Replica(config, 0, None, lambda index, sample: samples.append(sample))
    with asynchronous_scheduling(True):
        await replica.start()
    replica.version = 0
    async with asyncio.TaskGroup() as group:
        requests = [group.create_task(request(replica, number)) for number in range(REQUESTS)]
        for version in range(1, UPDATES + 1):
            await asyncio.sleep(0.15)
            await replica.update_weights(str(TINY / "model.safetensors"), version)
    async with aclosing(replica.generate([5] * 320, sampling(0), "left")) as deltas:
        await anext(deltas)
    await request(replica, 3)
    result = {
        "ahead": replica._engine.vllm_config.scheduler_config.async_scheduling,
        "wrong": [task.result()[0] for task in requests if task.result()[0]],
        "versions": max(task.result()[1] for task in requests),
        "used_blocks": replica.usable_blocks - min(sample.free_blocks for sample in samples),
        "still_used": replica.usable_blocks - samples[-1].free_blocks,
        "still_running": samples[-1].running,
    }
    await replica.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    prepare_environment()
    asyncio.run(main())
