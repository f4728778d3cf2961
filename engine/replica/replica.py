"""One vLLM engine behind the `Generator` port. vLLM is imported only when an engine is built.

Invariants
- A replica's methods raise `ReplicaDied` for any failure of the engine; the caller may continue elsewhere from the ids.
- Each engine step is in one of the KV samples that reach `on_step` (`engine.replica.step_reports`).
- After `shutdown` no process of the engine is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import signal
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

from engine import clock
from engine.errors import first_error
from engine.process.daemon_thread import DaemonThread
from engine.process.forks import Forks, forks_die_with_us
from engine.process.last_words import LastWords
from engine.replica.adapter_folder import peft_folder
from engine.replica.config import ReplicaConfig, check_sleep, prepare_environment
from engine.replica.output_bundler import BEGAN, LOGPROBS
from engine.replica.port import Delta, GrammarRefused, KvSample, ReplicaDied, ReplicaMisconfigured, Sampling
from engine.routes import Routes, route_dtype
from engine.types import Floats, TokenScores


def largest_id(token_ids: Sequence[int]) -> int:
    """Returns the largest id, 0 without one, and leaves nothing that refers to the memory of an array.

    An array cannot grow while something does: a frame that the watch for stalls holds for a moment, say.
    """
    return (
        int(np.array(token_ids, np.intc).max(initial=0)) if isinstance(token_ids, array) else max(token_ids, default=0)
    )


class Replica:
    """A replica with a vLLM engine. It is used from the event loop that started it."""

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
        self.usable_blocks = 0
        self._core = core
        self._on_step = on_step
        self._updating = False
        self._asleep = False
        self._measures_grammars = False
        self._route_rows: list[int] = []  # which rows of the routes that the engine reports are those of mixtures
        self._route_dtype: np.dtype[Any] = route_dtype(0)
        self._ends: dict[str, list[tuple[int, float]]] = {}  # per request: (version, its tokens at the version's end)
        self._adapters: dict[int, Any] = {}  # vLLM's LoRARequest by version, the oldest first
        self._using: Counter[int] = Counter()  # requests by version
        self._scores = count()  # numbers the sequences that are scored
        self._engine: Any = None
        self._requests: Any = None  # the RequestSender of the engine
        self._unwatch: Callable[[], None] = _do_nothing
        # Kept for the engine's life: the engine process dies with the thread that forked it (`engine.process.forks`).
        self._thread = DaemonThread(f"replica-{index}")
        self._forks: Forks | None = None  # ends what was forked, while the engine starts
        self._last_words = LastWords("vllm.v1.engine.core")
        self._killed = False  # set by `kill`

    async def start(self) -> None:
        """Starts the engine. Raises ReplicaDied if it is not up within the deadline, ReplicaMisconfigured if it never
        will be, because it says itself why it cannot run the model.
        """
        prepare_environment()
        try:
            async with asyncio.timeout(self.config.start_deadline_s) as budget:
                await self._thread.run(self._build)
                self.pid = self._engine.engine_core.resources.engine_manager.processes[0].pid
                self._watch(os.pidfd_open(self.pid))
                # one block is vLLM's own
                self.usable_blocks = self._engine.vllm_config.cache_config.num_gpu_blocks - 1
                async with self._alive():  # an engine that is told to end while it starts comes up before it ends
                    await self._engine.collective_rpc("adopt", args=(0 if self.config.devices else 10,))
                    self._measures_grammars = all(await self._engine.collective_rpc("measure_grammars"))
                    if self.config.returns_routes:
                        await self._report_routes()
                    if not self.config.lora_rank:
                        await self._engine.collective_rpc("init_weight_transfer_engine", args=({},))
                    # vLLM remembers these. Otherwise the first request asks for them, for ever if the engine is dead.
                    await self._engine.get_supported_tasks()
        except Exception as failure:
            error = first_error(failure) if isinstance(failure, ExceptionGroup) else failure
            last_words = self._last_words.read()
            await self.shutdown()
            misconfigured = last_words or isinstance(error, (ValueError, ImportError))
            kind = ReplicaMisconfigured if misconfigured else ReplicaDied
            cause = last_words or str(error) or type(error).__name__
            if budget.expired():
                cause = f"it was not up within {self.config.start_deadline_s:g} s. Fix: raise start_deadline_s"
            raise kind(f"replica {self.index} did not start: {cause}") from error

    @property
    def cause(self) -> str:
        """Why the engine died, as far as the engine or the system told, or empty."""
        if last_words := self._last_words.read():
            return last_words
        if self._engine is None or not self.pid or self._killed:
            return ""
        code = self._engine.engine_core.resources.engine_manager.processes[0].exitcode
        return _signal_cause(code)

    def _watch(self, process: int) -> None:
        """Sets `died` as soon as the engine's process ends. process: a pidfd, which is closed then or by `shutdown`."""
        loop = asyncio.get_running_loop()

        def end() -> None:
            loop.remove_reader(process)
            os.close(process)
            self._unwatch = _do_nothing
            self._fail()

        self._unwatch = end
        loop.add_reader(process, end)

    def _build(self) -> None:
        if not Path(self.config.checkpoint, "config.json").is_file():  # vLLM would say that it may not go online
            raise ValueError(f"no config.json in {self.config.checkpoint!r}")
        if not self.config.devices:  # otherwise the first request waits 15 s while one sampling helper is compiled
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # read when vLLM is imported
        import vllm
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        import engine.replica.weight_transfer
        from engine.replica.kv_stats import kv_stats_logger
        from engine.replica.output_reader import read_directly
        from engine.replica.request_sender import RequestSender
        from engine.replica.token_streams import TokenStreams

        if self.config.devices and current_platform.is_cpu():  # vLLM would take most of the machine's memory
            raise ValueError(
                f"vLLM finds no GPU here, and devices are {self.config.devices}. Fix: devices=() for the CPU, or the "
                "extra `gpu` and a driver"
            )
        if self.config.sleeps:
            check_sleep(vllm.__version__)
        if self._core is not None and not self.config.devices and self.config.tensor_parallel == 1:
            os.sched_setaffinity(0, {self._core})  # pins this thread, and with it the engine process
        backend = f"rocstar-{self.config.weight_transfer}"
        transfer = None if self.config.lora_rank else WeightTransferConfig(backend=backend)
        settings = AsyncEngineArgs(
            **self.config.arguments(self.index), weight_transfer_config=transfer
        ).create_engine_config()
        if not self.config.devices:
            _check_heads(settings.model_config)
            if self.config.lora_rank and settings.model_config.get_num_experts():
                raise ValueError(
                    "vLLM serves no adapters of a mixture of experts on the CPU, where its experts would need Triton. "
                    "Fix: send merged weights (adapters=false), or GPUs"
                )
        scheduler = settings.scheduler_config  # vLLM has chosen one of its own; this one takes its place
        kind = "BundlingAsyncScheduler" if scheduler.async_scheduling else "BundlingScheduler"
        scheduler.scheduler_cls = f"engine.replica.scheduler.{kind}"
        # Imported before the fork, so that the child has the backend.
        assert engine.replica.weight_transfer.register is not None
        if not self.config.devices:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # after create_engine_config, which sets spawn
        alone = not self.config.devices  # on a GPU vLLM may spawn
        with self._last_words.kept(), forks_die_with_us(alone=alone) as self._forks:
            if self.died.is_set():  # given up before there was a `Forks.end` to call
                raise RuntimeError("given up")
            tap = kv_stats_logger(self._stepped)
            self._engine = AsyncLLM.from_vllm_config(settings, disable_log_stats=True, stat_loggers=[tap])
            self._engine.log_stats = False  # the tap needs none of the front end's own statistics
            streams = self._engine.output_processor = TokenStreams(self._engine.output_processor)
            read_directly(self._engine.engine_core, streams.deliver)
            self._requests = RequestSender(self._engine)
        if self.died.is_set():  # given up meanwhile, but a thread cannot be cancelled
            self._engine.shutdown(0.1)

    def _stepped(self, sample: KvSample) -> None:
        self._touch()
        self._on_step(self.index, sample)

    def _touch(self) -> None:
        self.last_step_at = clock.now()

    def _enter(self) -> None:
        """Counts a request that begins. From now on a step is expected."""
        if self.in_flight == 0:
            self._touch()
        self.in_flight += 1

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, request_id: str
    ) -> AsyncGenerator[Delta, None]:
        """See `engine.replica.port.Generator`. Raises ValueError for a prompt that is too long or has an unknown id."""
        from vllm.exceptions import VLLMValidationError

        from engine.replica.grammars import REFUSED

        self._enter()
        ends = self._ends.setdefault(request_id, [])
        total, routed = 0, sampling.routes_from
        version, adapter = self._adapter(sampling.version)
        self._using[version] += 1
        try:
            engine, streams = self._engine, self._engine.output_processor
            self._check_ids(token_ids)
            try:
                await self._requests.send(request_id, token_ids, sampling, adapter)
                stream = streams.stream(request_id)
                finish, cached = None, 0
                while finish is None:
                    output = await stream.next()
                    finish = None if output.finish_reason is None else str(output.finish_reason)
                    if sampling.grammar is not None and finish == "error":
                        reason = str(output.stop_reason or "")
                        if reason.startswith(REFUSED):
                            raise GrammarRefused(reason.removeprefix(REFUSED))
                        raise GrammarRefused("it allows no token after what was sampled")
                    if output.prefill_stats is not None:
                        cached = output.prefill_stats.num_cached_tokens
                    total += len(output.new_token_ids)
                    extra = output.kv_transfer_params or {}  # an error's output has none
                    logprobs, forced = self._logprobs_of(extra)
                    began = extra.get(BEGAN)
                    now = self.version if adapter is None else version
                    spans = _spans([*ends, (now, total)], total) if finish else ()
                    routes, routes_from = self._routes_of(output), routed
                    routed += 0 if routes is None else len(routes)
                    yield Delta(
                        token_ids=output.new_token_ids,
                        logprobs=logprobs,
                        finish=finish,
                        cached_tokens=cached,
                        version=now,
                        spans=spans,
                        forced=forced,
                        began=began,
                        routes=routes,
                        routes_from=routes_from,
                    )
            finally:
                # Aborted here, not when the stream is collected: an abort that late could meet a weight update.
                if (running := streams.close(request_id)) is not None:
                    await engine.abort(running, internal=True)
        except GrammarRefused:
            raise
        except VLLMValidationError as error:
            raise ValueError(f"replica {self.index} refuses the request: {error}") from error
        except Exception as error:
            self._fail()
            cause = self.cause or str(error) or type(error).__name__
            raise ReplicaDied(f"replica {self.index}: {cause}") from error
        finally:
            self.in_flight -= 1
            self._using[version] -= 1
            del self._ends[request_id]

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        """Raises VLLMValidationError for an unknown id, which vLLM does not check, and of which it dies."""
        from vllm.exceptions import VLLMValidationError

        vocabulary = self._engine.vllm_config.model_config.get_vocab_size()
        largest = largest_id(token_ids)
        if largest >= vocabulary:
            raise VLLMValidationError(f"token id {largest} is beyond the model's vocabulary of {vocabulary}")

    def _logprobs_of(self, extra: Mapping[str, Any]) -> tuple[list[float], list[bool]]:
        """Returns the model's own log-probabilities of an output's tokens, and under a grammar which are forced."""
        columns = extra.get(LOGPROBS, ([],))
        if len(columns) == 1:
            return columns[0], []
        from engine.replica.grammar_mass import UNKNOWN, judged

        masses = columns[1] if self._measures_grammars else [UNKNOWN] * len(columns[1])
        pairs = [judged(logprob, mass) for logprob, mass in zip(columns[0], masses, strict=True)]
        return [logprob for logprob, _ in pairs], [forced for _, forced in pairs]

    async def _report_routes(self) -> None:
        """Lets the engine report routes. Raises ValueError for a model that has none."""
        try:
            answers = await self._engine.collective_rpc("report_routes", args=(not self.config.devices,))
        except Exception as error:
            raise ValueError(f"it cannot report routes: {error}") from error
        self._route_rows, experts = answers[0]
        self._route_dtype = route_dtype(experts)
        self._requests.returns_routes = True

    def _routes_of(self, output: Any) -> Routes | None:
        """Returns the routes that an output has, of the layers that are mixtures."""
        ids = output.routed_experts
        if ids is None or not self.config.returns_routes:
            return None
        if ids.shape[1] != len(self._route_rows):
            ids = ids[:, self._route_rows]
        return Routes.of(ids.astype(self._route_dtype, copy=False))

    async def abort(self, request_id: str) -> None:
        """See `engine.replica.port.ReplicaPort`."""
        try:
            async with asyncio.timeout(self.config.step_deadline_s):
                await self._engine.abort(request_id)
        except Exception as error:
            self._fail()
            raise ReplicaDied(f"replica {self.index}: abort failed: {str(error) or type(error).__name__}") from error

    async def update_weights(self, path: str, version: int) -> None:
        """Loads published weights. Requests in flight pause meanwhile and continue with their KV recomputed.

        Raises ReplicaDied if it fails: an engine with half an update must not serve.
        """
        async with self._changing(f"weight update {version}"):
            if self.config.lora_rank:
                await self._add(path, version)
            else:
                await self._load(path, version)

    async def _add(self, path: str, version: int) -> None:
        """Loads an adapter beside those that are there, and removes the oldest. Nothing pauses."""
        from vllm.lora.request import LoRARequest

        name = f"version-{version}"  # vLLM's prefix cache tells adapters by their names
        adapter = LoRARequest(name, version + 1, str(peft_folder(Path(path))), load_inplace=version in self._adapters)
        if not await self._engine.add_lora(adapter):
            raise RuntimeError(f"vLLM did not load {path}")
        self._adapters.pop(version, None)
        self._adapters[version] = adapter
        self.version = version
        for old in list(self._adapters)[: -self.config.adapters]:
            if not self._using[old]:  # otherwise a later update removes it
                await self._engine.remove_lora(self._adapters.pop(old).lora_int_id)

    def _adapter(self, version: int | None) -> tuple[int, Any]:
        """Returns the wanted version and its adapter, or the newest if that one is not there. The adapter is None in
        replicas that load all weights.
        """
        served = self.version if version is None or version not in self._adapters else version
        return served, self._adapters.get(served)

    async def sleep(self) -> None:
        """Gives up the GPU memory, weights included, since new ones come. Does nothing unless `sleeps` is configured.

        Raises ReplicaDied.
        """
        if self.config.sleeps:
            async with self._changing("sleep"):
                await self._engine.sleep(level=2)
            self._asleep = True

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Takes a part of the memory back; the engine serves once it has both. Raises ReplicaDied."""
        if self._asleep:
            async with self._changing("wake"):
                await self._engine.wake_up([part])
            self._asleep = part == "weights"

    @asynccontextmanager
    async def _changing(self, what: str) -> AsyncIterator[None]:
        """Bounds a change of the engine in time. A failure is the replica's death. No step is expected meanwhile."""
        self._updating = True
        try:
            async with asyncio.timeout(self.config.update_deadline_s) as budget, self._alive():
                yield
        except Exception as error:
            self._fail()
            first = first_error(error) if isinstance(error, ExceptionGroup) else error
            cause = self.cause or str(first) or type(first).__name__
            if budget.expired():
                deadline = f"{self.config.update_deadline_s:g} s (update_deadline_s)"
                cause = f"it was not done within {deadline}. Fix: run less on this machine, or raise the deadline"
            raise ReplicaDied(f"replica {self.index}: {what} failed: {cause}") from error
        finally:
            self._updating = False
            self._touch()

    async def _load(self, path: str, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        paused = self.in_flight > 0 or not await self._engine.reset_prefix_cache(reset_connector=True)
        if paused:
            await self._pause(clear_cache=True)
        await self._engine.start_weight_update()
        published = {"path": path, "version": version, "reader": f"replica-{self.index}-{self.pid}"}
        await self._engine.update_weights(WeightTransferUpdateRequest(published))
        await self._engine.finish_weight_update()
        await self._end_version()
        self.version = version
        if paused:
            await self._engine.resume_generation()

    async def _end_version(self) -> None:
        """Notes that what the engine has sampled so far is of the current version. vLLM before 0.32 does not tell."""
        core, streams = self._engine.engine_core, self._engine.output_processor
        while self._ends and (streams.delivering or not core.outputs_queue._getters):  # noqa: ASYNC110
            await asyncio.sleep(0)  # its last step is still being read
        sampled = streams.sampled()
        for request_id, ends in self._ends.items():  # a request that is not there any more has ended
            ends.append((self.version, sampled.get(request_id, math.inf)))

    async def _pause(self, *, clear_cache: bool) -> None:
        """Stops the steps and keeps the requests. vLLM's `pause_generation` does the same and sleeps for 20 ms."""
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)

    @asynccontextmanager
    async def _alive(self) -> AsyncIterator[None]:
        """Raises if the engine's process ends inside; vLLM would leave its caller without an answer."""
        async with asyncio.TaskGroup() as group:
            death = group.create_task(self._death(), name=f"death-{self.index}")
            yield
            death.cancel()

    async def _death(self) -> None:
        await self.died.wait()
        raise RuntimeError("the engine died")

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> Floats:
        """Returns the log-probability of every token but the first of each sequence, concatenated: float32
        [sum(len - 1)].

        All are computed in one step, since each step reads all of the weights. Raises ReplicaDied.
        """
        async with self._changing("canary"), asyncio.TaskGroup() as group:
            if not self._adapters:
                await self._pause(clear_cache=False)
            tasks = [group.create_task(self._scored(ids, 1), name=f"canary-{n}") for n, ids in enumerate(sequences)]
            await asyncio.sleep(0)  # lets the tasks send their requests
            if not self._adapters:
                await self._engine.resume_generation()
        return np.concatenate([task.result().logprobs_T for task in tasks])

    async def score(self, token_ids: Sequence[int], start: int, top: int = 0) -> TokenScores:
        """See `engine.replica.port.ReplicaPort`. Raises ValueError for a sequence that the engine refuses."""
        from vllm.exceptions import VLLMValidationError

        try:
            self._check_ids(token_ids)
            async with self._alive():
                return await self._scored(token_ids, start, top, reuse=True)
        except Exception as error:
            first = first_error(error) if isinstance(error, ExceptionGroup) else error
            if isinstance(first, VLLMValidationError):
                raise ValueError(f"replica {self.index} refuses the sequence: {first}") from error
            self._fail()
            cause = self.cause or str(first) or type(first).__name__
            raise ReplicaDied(f"replica {self.index}: {cause}") from error

    async def _scored(self, token_ids: Sequence[int], start: int, top: int = 0, *, reuse: bool = False) -> TokenScores:
        """Returns the scores of the tokens from `start` on. reuse: reads the KV of the tokens before them, if it is
        there; should the cache hold more than these, which have no scores then, the sequence is computed again.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        parameters = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=top,
            flat_logprobs=True,
            skip_reading_prefix_cache=not reuse,
            detokenize=False,
        )
        last = None
        self._enter()
        try:
            prompt, (_, adapter) = tokens_input(list(token_ids)), self._adapter(None)
            name = f"score-{next(self._scores)}"
            async for output in self._engine.generate(prompt, parameters, name, lora_request=adapter):
                last = output
        finally:
            self.in_flight -= 1
        assert last is not None
        if (last.num_cached_tokens or 0) >= start:  # the last token before `start` predicts the first one
            return await self._scored(token_ids, start, top)
        rows = last.prompt_logprobs  # each position but the first has its own token, then the likeliest ones
        shape = len(token_ids) - 1, 1 + top
        logprobs_TJ = np.asarray(rows.logprobs, np.float32).reshape(shape)[start - 1 :]
        ids_TJ = np.asarray(rows.token_ids, np.int64).reshape(shape)[start - 1 :].astype(np.int32)
        return TokenScores(
            logprobs_T=logprobs_TJ[:, 0].copy(),
            top=top,
            top_ids=ids_TJ[:, 1:].flatten(),
            top_logprobs=logprobs_TJ[:, 1:].flatten(),
        )

    def stalled(self, now: float) -> str | None:
        """Returns what is wrong if the engine died unnoticed, or requests are in flight but no step came within the
        deadline; otherwise None. An update has a deadline of its own and is no stall.
        """
        if self._engine is not None and self._engine.errored:
            return "it died unnoticed"
        if not self.in_flight or self._updating or now - self.last_step_at <= self.config.step_deadline_s:
            return None
        return (
            f"it made no step within {self.config.step_deadline_s:g} s (ReplicaConfig.step_deadline_s, the option "
            f"replica_step_deadline_s) and was killed, with {self.in_flight} requests in flight. Fix: if it was only "
            "slow, run less on this machine or fewer requests at once, or raise the deadline"
        )

    def _fail(self) -> None:
        self.died.set()

    def kill(self) -> None:
        """Ends a hanging engine process; its callers get ReplicaDied."""
        self._killed = True
        self._fail()
        if self._forks is not None:
            self._forks.end()
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def shutdown(self) -> None:
        """Ends the engine process; its callers get ReplicaDied. May be called more than once."""
        self._unwatch()
        self._fail()
        self._last_words.close()
        if self._forks is not None:  # otherwise the thread waits for an engine that does not come up
            self._forks.end()
        engine, self._engine = self._engine, None
        if engine is not None:
            from vllm.v1.engine.exceptions import EngineDeadError

            engine.output_processor.propagate_error(EngineDeadError())  # otherwise callers wait for outputs for ever
            if engine.output_handler is not None:
                engine.output_handler.cancel()  # it must not report an engine that ends late and is killed
            await self._thread.run(_end, engine)
            await asyncio.sleep(0)  # lets the engine's output task end
            del engine
            gc.collect()  # otherwise AsyncLLM.__del__ complains when the interpreter exits
        self._thread.close()


def _do_nothing() -> None: ...


def _check_heads(model: Any) -> None:
    """Raises ValueError for a model whose attention vLLM cannot compute on the CPU, which it says only in a step."""
    if model.use_mla:
        from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend as Backend

        name = "kv_lora_rank + qk_rope_head_dim"
    else:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as Backend

        name = "head_dim"
    size, supported = model.get_head_size(), Backend.get_supported_head_sizes()
    if size not in supported:
        raise ValueError(
            f"{name} of the model must be one of {', '.join(map(str, supported))} for vLLM on the CPU, got {size}"
        )


def _signal_cause(code: int | None) -> str:
    """Returns which signal ended a process, by its exit code; empty if it still runs or ended by itself.

    >>> _signal_cause(-9)
    'its process was ended by SIGKILL, as by the system where memory is short'
    """
    if code is None or code >= 0:
        return ""
    name = signal.Signals(-code).name
    return f"its process was ended by {name}" + ", as by the system where memory is short" * (name == "SIGKILL")


def _spans(ends: Sequence[tuple[int, float]], total: int) -> list[tuple[int, int, int]]:
    """Returns (version, start, end) of each version that has tokens.

    ends: (version, tokens at its end), in order. total: all tokens.
    """
    spans: list[tuple[int, int, int]] = []
    start = 0
    for version, sampled in ends:
        end = int(min(sampled, total))
        if start < end:
            spans.append((version, start, end))
        start = end
    return spans


def _end(engine: Any) -> None:
    processes = engine.engine_core.resources.engine_manager.processes
    engine.shutdown(0.1)
    for process in processes:
        process.join(5.0)  # otherwise one that had to be killed stays a zombie
