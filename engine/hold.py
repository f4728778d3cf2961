"""Tokens leave the engine in bundles: an adapter to vLLM's scheduler, which its process imports.

A token that leaves by itself costs the engine a message part and the node some 50 us, whatever it is used for; a node's
event loop could follow 20,000 tokens/s and no more.

Invariants
- Tokens arrive in their order, and none is held when its request ends by itself.
- All tokens of a bundle were sampled by one version of the weights: nothing is held across a pause.
- A request that is aborted, or whose engine dies, loses less than BUNDLE tokens, as if they had not been sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

BUNDLE = 16  # tokens
DELIVER_AT = "deliver_at"  # in SamplingParams.extra_args: ids of tokens with which a bundle leaves at once


@dataclass(slots=True)
class _Held:
    deliver_at: frozenset[int]
    outputs: list[EngineCoreOutput] = field(default_factory=list)


class _Bundles:
    """Before one of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._requests: dict[str, _Held] = {}
        self._pausing = False

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        extra = request.sampling_params.extra_args or {}
        if DELIVER_AT in extra:
            self._requests[request.request_id] = _Held(frozenset(extra[DELIVER_AT]))

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._requests.pop(request.request_id, None)
        return finished

    def set_pause_state(self, pause_state: PauseState) -> None:
        """A pause begins a step later when tokens are held: they leave with it."""
        self._pausing = pause_state is PauseState.PAUSED_ALL and any(held.outputs for held in self._requests.values())
        if not self._pausing:
            super().set_pause_state(pause_state)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        by_client = super().update_from_output(scheduler_output, model_runner_output)
        every = self._pausing or self.pause_state is not PauseState.UNPAUSED
        for found in by_client.values():
            found.outputs = [output for output in found.outputs if self._leaves(output, every)]
        if self._pausing:
            rest = [_bundle(held.outputs) for held in self._requests.values() if held.outputs]
            by_client.setdefault(0, EngineCoreOutputs()).outputs += rest
            for held in self._requests.values():
                held.outputs = []
            self._pausing = False
            super().set_pause_state(PauseState.PAUSED_ALL)
        return by_client

    def _leaves(self, output: EngineCoreOutput, every: bool) -> bool:
        """Whether it goes to the node now, and with it what was held of its request; else it is held."""
        held = self._requests.get(output.request_id)
        if held is None:
            return True
        ordinary = output.finish_reason is None and output.events is None and output.prefill_stats is None
        short = len(held.outputs) < BUNDLE - 1 and held.deliver_at.isdisjoint(output.new_token_ids)
        if ordinary and short and not every:
            held.outputs.append(output)
            return False
        if held.outputs:
            _bundle([*held.outputs, output])
            held.outputs = []
        if output.finish_reason is not None:
            del self._requests[output.request_id]
        return True


class BundlingScheduler(_Bundles, Scheduler): ...


class BundlingAsyncScheduler(_Bundles, AsyncScheduler): ...


def _bundle(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """The last one, with the tokens and log-probabilities of all; the others have nothing else."""
    last = outputs[-1]
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    arrays = zip(*(output.new_logprobs[:3] for output in outputs if output.new_logprobs is not None), strict=True)
    last.new_logprobs = LogprobsLists(*(np.concatenate(parts) for parts in arrays))
    return last
