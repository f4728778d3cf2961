"""vLLM engines whose workers compute nothing, and turns on them without a loop above."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.benches.loop.script import Script
from bench.benches.rollout.load import Schedule
from engine.replica.config import ReplicaConfig
from engine.replica.port import Sampling
from engine.replica.replica import Replica


@dataclass(frozen=True, kw_only=True, slots=True)
class StubConfig(ReplicaConfig):
    """A replica's configuration with a stub worker that follows a script."""

    script: Script = field(kw_only=True)

    def arguments(self, index: int) -> dict[str, Any]:
        return ReplicaConfig.arguments(self, index) | {
            "worker_cls": "bench.benches.loop.stub_worker.StubWorker",
            "additional_config": {"script": msgspec.to_builtins(self.script)},
            "hf_overrides": {"max_position_embeddings": self.max_model_len},
        }


@contextmanager
def asynchronous_scheduling(on: bool) -> Iterator[None]:
    """Lets engines that start inside schedule a step before the one before has ended, as GPUs do by default.

    vLLM turns that off on CPUs, whose workers could not answer later; a stub worker can.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.__dict__["check_and_update_config"]

    def checked(cls: Any, vllm_config: Any) -> None:
        check.__func__(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = on

    CpuPlatform.check_and_update_config = classmethod(checked)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = check


async def bare_turns(replica: Replica, name: str, schedule: Schedule, end: int) -> int:
    """Generates the turns of a schedule by `Replica.generate`. Returns the number of tokens."""
    ids, tokens = list(schedule.prompt_ids), 0
    for number, turn in enumerate(schedule.turns):
        sampling = Sampling(
            max_tokens=2 * turn.tokens,
            temperature=1.0,
            seed=turn.seed,
            stop_token_ids=(end,),
            deliver_at=frozenset(),
        )
        async for delta in replica.generate(ids, sampling, f"{name}-{number}"):
            ids += delta.token_ids
            tokens += len(delta.token_ids)
        ids += turn.given
    return tokens


async def vllm_turns(replica: Replica, name: str, schedule: Schedule, end: int) -> int:
    """Generates the turns of a schedule by the replica's AsyncLLM, as vLLM does it. Returns the number of tokens."""
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    ids, tokens = list(schedule.prompt_ids), 0
    for number, turn in enumerate(schedule.turns):
        parameters = SamplingParams(
            max_tokens=2 * turn.tokens,
            temperature=1.0,
            seed=turn.seed,
            stop_token_ids=[end],
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,
        )
        async for output in replica._engine.generate(tokens_input([*ids]), parameters, f"{name}-{number}"):
            ids += output.outputs[0].token_ids
            tokens += len(output.outputs[0].token_ids)
        ids += turn.given
    return tokens
