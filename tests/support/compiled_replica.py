"""A replica for adapters whose engine compiles its model as on a GPU: Dynamo without guards, with the eager backend.

    python -m tests.support.compiled_replica          prints the tokens of two requests and one after an update

Run as a process of its own: it changes vLLM's CPU platform, which would leave LoRA uncompiled. What is computed says
nothing: whether there is an adapter is a flag on the CPU, which the first request freezes here, and a tensor on a GPU.
`adapter_sync` compares the numbers, uncompiled.
"""

import asyncio
import json
import os

from algo.learner.config import LearnerConfig
from engine.learner.process import LearnerProcess, LearnerProcessConfig
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.replica.port import Sampling
from engine.replica.replica import Replica
from engine.run.workspace import workspace
from tests.support.first_weights import CHECKPOINT, configure

ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "0",
    "VLLM_CPU_CI_ENV": "1",  # the CPU platform then compiles with the backend below
}
RANK = 8


class Compiled(ReplicaConfig):
    def arguments(self, index):
        return ReplicaConfig.arguments(self, index) | {"enforce_eager": False}


def compile_on_the_cpu():
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def forced(cls, config):
        original(cls, config)
        config.compilation_config.mode = CompilationMode.DYNAMO_TRACE_ONCE
        config.compilation_config.backend = "eager"

    CpuPlatform.simple_compile_backend = "eager"
    CpuPlatform.check_and_update_config = classmethod(forced)


async def tokens(replica, request):
    sampling = Sampling(max_tokens=4, temperature=1.0, seed=1, stop_token_ids=())
    return [
        token async for delta in replica.generate(list(range(5, 25)), sampling, request) for token in delta.token_ids
    ]


async def main():
    compile_on_the_cpu()
    settings = LearnerConfig(threads=1, weight_transfer="adapter", lora_rank=RANK, lr=3e-2, warmup_steps=0)
    config = Compiled(
        checkpoint=CHECKPOINT,
        max_model_len=256,
        weight_transfer="adapter",
        lora_rank=RANK,
        lora_targets=settings.lora_targets,
        update_deadline_s=200.0,
    )
    replica = Replica(config, 0, None, lambda index, sample: None)
    with workspace() as work:
        async with LearnerProcess(LearnerProcessConfig(module="algo.learner"), work, work / "log") as learner:
            await replica.start()
            compiled = replica._engine.vllm_config.compilation_config.mode
            result = {"mode": int(compiled), "bare": await tokens(replica, "bare")}
            await learner.configure(configure(settings, work, canary=[]))
            from tests.support.algo_fakes import batch  # imports torch, before which engines are forked

            trained, _ = await learner.train(batch(12, step=1), 1)
            await replica.update_weights(trained.weights, 1)
            result["adapted"] = await tokens(replica, "adapted")
            await replica.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    prepare_environment()
    asyncio.run(main())
