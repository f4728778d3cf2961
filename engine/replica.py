"""One vLLM engine behind the `Generator` port. The only file of the node that imports vLLM.

Invariants
- A replica's methods raise `ReplicaDied` for any failure of the engine; whoever sees it may continue elsewhere by ids.
- One KV sample per engine step reaches `on_step`, before the step's tokens reach their consumers.
- After `shutdown` no process of the engine is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.absent import scipy_absent
from engine.ports import Delta, KvSample, ReplicaDied, Sampling
from engine.types import Floats

# Set before torch and vLLM are imported, inherited by the engine processes:
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # an engine is pinned to one core; two OpenMP threads on it would spin against each other
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the affinity is set by the node, per engine
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "64",  # outputs handled before the loop turns to others: its lag
    "HF_HUB_OFFLINE": "1",  # a checkpoint is a local folder
    "TORCHDYNAMO_DISABLE": "1",  # else the first request waits some 15 s for the compilation of one sampling helper
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a NUMA notice per engine
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaConfig:
    """How an engine is built. kv_blocks x block_size tokens of KV cache; dtype float32 on the CPU.

    weight_transfer: "shm" on one CPU host; "ipc" or "nccl" are vLLM's own, for GPUs.
    """

    checkpoint: str
    max_model_len: int = 1024
    max_num_seqs: int = 256
    kv_blocks: int = 1024
    block_size: int = 32
    dtype: str = "float32"
    weight_transfer: str = "shm"
    start_deadline_s: float = 120.0
    step_deadline_s: float = 60.0
    update_deadline_s: float = 60.0

    def __post_init__(self) -> None:
        if (self.kv_blocks - 1) * self.block_size < self.max_model_len:
            raise ValueError(
                f"kv_blocks {self.kv_blocks} x block_size {self.block_size} do not hold one sequence of "
                f"max_model_len {self.max_model_len} (one block is vLLM's own)"
            )
        if self.block_size % 32:
            raise ValueError(f"block_size must be a multiple of 32 on the CPU, got {self.block_size}")


class Replica:
    """Started by `start`, used from the event loop that started it."""

    def __init__(
        self, config: ReplicaConfig, index: int, core: int | None, on_step: Callable[[int, KvSample], None]
    ) -> None:
        self.config = config
        self.index = index
        self.pid = 0
        self.version = -1
        self.in_flight = 0
        self.died = asyncio.Event()
        self.last_step_at = 0.0
        self._core = core
        self._on_step = on_step
        self._engine: Any = None
        # Kept for the engine's life: the engine process dies with the thread that forked it (PR_SET_PDEATHSIG).
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"replica-{index}")

    async def start(self) -> None:
        """Raises ReplicaDied when the engine does not come up within the deadline."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.config.start_deadline_s):
                await loop.run_in_executor(self._thread, self._build)
                self.pid = (await self._engine.collective_rpc("adopt"))[0]
                await self._engine.init_weight_transfer_engine(_init_request())
        except Exception as error:
            await self.shutdown()
            raise ReplicaDied(f"replica {self.index} did not start: {str(error) or type(error).__name__}") from error

    def _build(self) -> None:
        with scipy_absent():
            from vllm import AsyncEngineArgs
            from vllm.config import WeightTransferConfig
            from vllm.v1.engine.async_llm import AsyncLLM

            import engine.weights

        if self._core is not None:
            os.sched_setaffinity(0, {self._core})  # of this thread; the engine process inherits it
        config = self.config
        settings = AsyncEngineArgs(
            model=config.checkpoint,
            skip_tokenizer_init=True,
            dtype=config.dtype,
            enforce_eager=True,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            # Above anything that can be scheduled at once: a prefill that is split kills a seeded request on the CPU.
            max_num_batched_tokens=max(8192, config.max_num_seqs * config.max_model_len // 4),
            num_gpu_blocks_override=config.kv_blocks,
            kv_cache_memory_bytes=1 << 28,
            block_size=config.block_size,
            gpu_memory_utilization=0.05,
            seed=0,
            use_tqdm_on_load=False,
            weight_transfer_config=WeightTransferConfig(backend=config.weight_transfer),
            worker_extension_cls="engine.weights.WorkerExtension",
            distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        ).create_engine_config()
        assert engine.weights.register is not None  # imported before the fork, so that the child has the backend
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # after create_engine_config, which sets spawn
        self._engine = AsyncLLM.from_vllm_config(settings, disable_log_stats=True, stat_loggers=[self._tap(settings)])

    def _tap(self, settings: Any) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        usable = self.config.kv_blocks - 1  # one null block
        replica = self

        class Tap(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is None:
                    return
                replica._touch()
                replica._on_step(
                    replica.index,
                    KvSample(
                        free_blocks=round((1 - scheduler_stats.kv_cache_usage) * usable),
                        running=scheduler_stats.num_running_reqs,
                        waiting=scheduler_stats.num_waiting_reqs,
                        preempted=iteration_stats.num_preempted_reqs if iteration_stats else 0,
                    ),
                )

            def log_engine_initialized(self) -> None: ...

        return Tap

    def _touch(self) -> None:
        self.last_step_at = time.perf_counter()

    @property
    def usable_blocks(self) -> int:
        return self.config.kv_blocks - 1

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, request_id: str
    ) -> AsyncGenerator[Delta, None]:
        """See `engine.ports.Generator`. Raises ValueError for what vLLM refuses (too long, id out of vocabulary)."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=0,
            ignore_eos=sampling.ignore_eos,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        if self.in_flight == 0:
            self._touch()
        self.in_flight += 1
        try:
            async for output in self._engine.generate(tokens_input(list(token_ids)), parameters, request_id):
                part = output.outputs[0]
                logprobs = [next(iter(position.values())).logprob for position in part.logprobs or ()]
                spans = _spans(part.weight_versions) if part.finish_reason else ()
                yield Delta(
                    part.token_ids, logprobs, part.finish_reason, output.num_cached_tokens or 0, self.version, spans
                )
        except VLLMValidationError as error:
            raise ValueError(f"replica {self.index} refuses the request: {error}") from error
        except Exception as error:
            self._fail()
            raise ReplicaDied(f"replica {self.index}: {str(error) or type(error).__name__}") from error
        finally:
            self.in_flight -= 1

    async def update_weights(self, path: str, version: int) -> None:
        """Loads published weights. In-flight requests stall and go on with their KV recomputed.

        Raises ReplicaDied when it fails: an engine with half an update must not serve.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        try:
            async with asyncio.timeout(self.config.update_deadline_s):
                paused = self.in_flight > 0
                if paused:
                    await self._engine.pause_generation(mode="keep", clear_cache=True)
                else:
                    await self._engine.reset_prefix_cache()
                await self._engine.start_weight_update()
                await self._engine.update_weights(WeightTransferUpdateRequest({"path": path}))
                await self._engine.finish_weight_update(str(version))
                self.version = version
                if paused:
                    await self._engine.resume_generation()
        except Exception as error:
            self._fail()
            raise ReplicaDied(f"replica {self.index}: weight update {version} failed: {error}") from error

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> Floats:
        """Log-probability of every token but the first of each sequence, concatenated: float32 [sum(len - 1)]."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._prompt_logprobs(ids, n), name=f"canary-{n}") for n, ids in enumerate(sequences)
            ]
        return np.concatenate([task.result() for task in tasks])

    async def _prompt_logprobs(self, token_ids: Sequence[int], number: int) -> Floats:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        last = None
        self.in_flight += 1
        try:
            async with asyncio.timeout(self.config.update_deadline_s):
                async for output in self._engine.generate(
                    tokens_input(list(token_ids)), parameters, f"canary-{number}"
                ):
                    last = output
        except Exception as error:
            self._fail()
            raise ReplicaDied(f"replica {self.index}: canary failed: {str(error) or type(error).__name__}") from error
        finally:
            self.in_flight -= 1
        assert last is not None
        rows = zip(token_ids[1:], last.prompt_logprobs[1:], strict=True)
        return np.asarray([row[token].logprob if row else math.nan for token, row in rows], np.float32)

    def stalled(self, now: float) -> bool:
        """Requests are in flight but no step came for the deadline."""
        return self.in_flight > 0 and now - self.last_step_at > self.config.step_deadline_s

    def _fail(self) -> None:
        self.died.set()

    def kill(self) -> None:
        """Ends a hanging engine process: its callers get ReplicaDied."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def shutdown(self) -> None:
        """Ends the engine process; safe to call more than once."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, engine.shutdown, 0.1)
            await asyncio.sleep(0)  # the engine's output task ends
            del engine
            gc.collect()  # else AsyncLLM.__del__ complains when the interpreter exits
        self._thread.shutdown(wait=False)


def prepare_environment() -> None:
    """Must run before torch or vLLM is imported in the process. Raises RuntimeError when it is too late."""
    if "vllm" in sys.modules:
        raise RuntimeError("engine.replica.prepare_environment() must be called before vllm is imported")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # no Triton on a CPU: nothing is missing
    warnings.filterwarnings("ignore", message="`torch.distributed.reduce_op` is deprecated", category=FutureWarning)


def _spans(versions: Any) -> Sequence[tuple[int, int, int]]:
    """vLLM's spans; a label that is not a number is the engine's own before the first update."""
    return [(int(span.version), span.start, span.end) for span in versions or () if span.version.isdigit()]


def _init_request() -> Any:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    return WeightTransferInitRequest({})
