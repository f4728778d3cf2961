"""A vLLM worker that computes nothing and answers at a GPU's pace. For engine processes: it imports vLLM.

EngineCore, scheduler, KV cache manager and front end are vLLM's own; only the model is missing. What a request samples
is a `Script`: a filler, a tool call in each turn but the last, and an answer there.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

from bench.benches.loop.script import Script


class _Later(AsyncModelRunnerOutput):
    """A step's output, which is there when the step is due."""

    def __init__(self, output: ModelRunnerOutput, due: float) -> None:
        self._output, self._due = output, due

    def get_output(self) -> ModelRunnerOutput:
        time.sleep(max(0.0, self._due - time.perf_counter()))
        return self._output


class _Request:
    """prompt_tokens: those that are computed before the first token is sampled. computed: tokens so far."""

    def __init__(self, prompt_tokens: int, computed: int, tokens: list[int]) -> None:
        self.prompt_tokens, self.computed, self.tokens = prompt_tokens, computed, tokens
        self.sampled = 0

    def step(self, scheduled: int) -> list[int]:
        """Returns the token that the step samples, none in the middle of a prefill. The last token is repeated."""
        if self.computed + scheduled < self.prompt_tokens:
            return []
        token = self.tokens[min(self.sampled, len(self.tokens) - 1)]
        self.sampled += 1
        return [token]


class StubWorker(CPUWorker):
    """Takes the script from the engine's `additional_config`."""

    def initialize_from_config(self, *_: Any, **__: Any) -> None:
        self._script = msgspec.convert(self.vllm_config.additional_config["script"], Script)
        self._requests: dict[str, _Request] = {}
        self._due = 0.0

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        for request_id in scheduler_output.finished_req_ids:
            self._requests.pop(request_id, None)
        self._step = scheduler_output
        return None if scheduler_output.total_num_scheduled_tokens else EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammar_output: Any) -> _Later:
        step = self._step
        for new in step.scheduled_new_reqs:
            seed = 0 if new.sampling_params is None else new.sampling_params.seed or 0
            tokens = self._script.turn(new.prompt_token_ids, seed)
            self._requests[new.req_id] = _Request(len(new.prompt_token_ids), new.num_computed_tokens, tokens)
        cached = step.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._requests[request_id].computed = computed
        scheduled = step.num_scheduled_tokens
        sampled = [self._requests[request_id].step(tokens) for request_id, tokens in scheduled.items()]
        ids_N1 = np.asarray([tokens or [0] for tokens in sampled], np.int32)
        logprobs_N1 = np.full(ids_N1.shape, -1.0, np.float32)
        output = ModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={request_id: row for row, request_id in enumerate(scheduled)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(ids_N1, logprobs_N1, np.ones(len(sampled), np.int32)),
        )
        self._due = max(time.perf_counter(), self._due) + self._script.step_s
        return _Later(output, self._due)

    def synchronize_device(self, *_: Any, **__: Any) -> None: ...

    def reset_encoder_cache(self, *_: Any, **__: Any) -> None: ...
