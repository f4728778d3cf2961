"""Weight updates in the middle of requests where steps are scheduled ahead, as engines on GPUs do by default.

vLLM's engines on CPUs never do. Here the worker is a stub that answers later; all else is real.
"""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

import pytest
import pytest_asyncio

from bench.benches.loop.engines import StubConfig, asynchronous_scheduling
from bench.benches.loop.script import Script
from engine.replica.config import prepare_environment
from engine.replica.port import Sampling
from engine.replica.replica import Replica
from tests.support.paths import TINY

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

EARLY = 45  # a token that leaves the engine at once; others leave in bundles
SCRIPT = Script(step_s=0.01, tokens=120, calls=0, words=list(range(40, 60)), call=[20], answer=[21], end=2, ends=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(StubConfig):
    def arguments(self, index):
        return StubConfig.arguments(self, index) | {
            "worker_cls": "tests.support.versioned_worker.VersionedWorker",
            "max_num_batched_tokens": 256,  # long prompts are computed in several steps
        }


class Engine:
    """A replica and its KV samples."""

    def __init__(self):
        self.samples = []
        config = Config(checkpoint=str(TINY), max_model_len=512, kv_blocks=256, script=SCRIPT)
        self.replica = Replica(config, 0, None, lambda index, sample: self.samples.append(sample))

    async def request(self, number):
        """(tokens, versions that their log-probabilities tell, versions that the spans tell, parts) of a request."""
        tokens, told, parts, spans = [], [], 0, ()
        async for delta in self.replica.generate(prompt(number), sampling(number), f"request-{number}"):
            tokens += delta.token_ids
            told += [round(-logprob) for logprob in delta.logprobs]
            spans = delta.spans
            parts += 1
        return tokens, told, [version for version, start, end in spans for _ in range(start, end)], parts


def prompt(number):
    return [5] * (4 + 15 * number)


def sampling(seed):
    stop, early = (SCRIPT.end,), frozenset({EARLY})
    return Sampling(max_tokens=400, temperature=1.0, seed=seed, stop_token_ids=stop, deliver_at=early)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine():
    prepare_environment()
    made = Engine()
    with asynchronous_scheduling(True):
        await made.replica.start()
    yield made
    await made.replica.shutdown()


async def test_each_token_is_there_once_and_of_the_version_that_sampled_it(engine):
    replica = engine.replica
    assert replica._engine.vllm_config.scheduler_config.async_scheduling
    replica.version = 0
    async with asyncio.TaskGroup() as group:
        requests = [group.create_task(engine.request(number)) for number in range(24)]
        for version in range(1, 7):
            await asyncio.sleep(0.15)
            await replica.update_weights(str(TINY / "model.safetensors"), version)
    crossed = set()
    for number, request in enumerate(requests):
        tokens, sampled_by, said, parts = request.result()
        assert tokens == SCRIPT.turn(prompt(number), number)
        assert said == sampled_by
        assert parts < len(tokens) / 2, "in bundles"
        crossed.add(len(set(said)))
    assert max(crossed) > 2, "some were sampled by several versions"


async def test_kv_blocks_are_counted_right_when_requests_ended_or_were_left(engine):
    async with aclosing(engine.replica.generate([5] * 320, sampling(0), "left")) as deltas:
        await anext(deltas)
    await engine.request(3)
    assert min(sample.free_blocks for sample in engine.samples) < engine.replica.usable_blocks - 10
    assert engine.samples[-1].free_blocks == engine.replica.usable_blocks
    assert engine.samples[-1].running == 0
