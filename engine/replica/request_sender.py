"""Sends our requests to an engine without making and checking anew what all requests of a run have in common.

vLLM's front end checks the parameters of each request against the model and sends it through pyzmq's asyncio socket,
which costs the node's event loop several times what the message does. Here the first request of a kind goes that way,
and later ones are copies of what came out. This adapts an interface that may change. It imports vLLM, so only code that
builds an engine imports it.

Invariants
- A request that vLLM would refuse is refused by vLLM: prompts of unusual length, grammars and new kinds go its way.
- No two requests have the same `request_id`, as vLLM demands of those whose names are the same.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import zmq
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.exceptions import EngineDeadError

from engine.replica.output_bundler import BUNDLE_SIZE, DELIVER_AT
from engine.replica.port import Sampling
from engine.replica.routes.slots import ROUTES_FROM

KINDS = 64  # that are remembered
_ADD = EngineCoreRequestType.ADD.value
_MORE, _LAST = int(zmq.SNDMORE | zmq.NOBLOCK), int(zmq.NOBLOCK)  # arithmetic on pyzmq's enums takes microseconds


class RequestSender:
    """Sends requests of an AsyncLLM whose output processor is a `TokenStreams`.

    returns_routes: whether the engine reports routes, which each request then asks for.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._client = engine.engine_core
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(engine.engine_core.input_socket.underlying)
        self._longest = engine.vllm_config.model_config.max_model_len
        self._made: dict[Any, EngineCoreRequest] = {}  # by kind
        self._numbers = count()
        self.returns_routes = False

    async def send(self, name: str, token_ids: Sequence[int], sampling: Sampling, adapter: Any) -> None:
        """Adds a request. adapter: vLLM's LoRARequest or None. Raises vLLM's errors."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else [*token_ids]
        kind = _kind(sampling, adapter)
        made = self._made.get(kind)
        if made is None or sampling.grammar is not None or not 0 < len(ids) < self._longest:
            made = await self._checked(name, ids, sampling, adapter)
            if sampling.grammar is None:
                if len(self._made) == KINDS:
                    self._made.clear()
                self._made[kind] = made
        if self._engine.errored:
            raise EngineDeadError
        request = copy.copy(made)
        request.request_id, request.external_req_id = f"{name}-{next(self._numbers):x}", name
        request.prompt_token_ids, request.arrival_time = ids, time.time()
        request.sampling_params = copy.copy(made.sampling_params)
        request.sampling_params.max_tokens, request.sampling_params.seed = sampling.max_tokens, sampling.seed
        if self.returns_routes:
            parameters = request.sampling_params
            parameters.extra_args = {**parameters.extra_args, ROUTES_FROM: sampling.routes_from}
            parameters.routed_experts_prompt_start = sampling.routes_from  # vLLM's own name for it, on GPUs
        request.lora_request = adapter  # one of the same name may have been loaded anew since
        request.client_index = self._client.client_index
        self._engine.output_processor.add_request(request)
        self._engine._run_output_handler()
        self._client._ensure_output_queue_task()
        frames = self._client.encoder.encode(request)
        for frame in (self._client.core_engine, _ADD, *frames[:-1]):
            self._socket.send(frame, _MORE)
        self._socket.send(frames[-1], _LAST)

    async def _checked(self, name: str, ids: list[int], sampling: Sampling, adapter: Any) -> EngineCoreRequest:
        """Returns the request as vLLM makes it. Raises VLLMValidationError."""
        return self._engine.input_processor.process_inputs(
            name,
            tokens_input(ids),
            _parameters(sampling),
            supported_tasks=await self._engine.get_supported_tasks(),
            lora_request=adapter,
        )


def _kind(sampling: Sampling, adapter: Any) -> tuple[Any, ...]:
    """Returns all that is the same for many requests."""
    return (
        sampling.temperature,
        sampling.top_p,
        sampling.stop_token_ids,
        sampling.ignore_eos,
        sampling.deliver_at,
        sampling.bundle,
        adapter,
    )


def _parameters(sampling: Sampling) -> SamplingParams:
    extra: dict[str, Any] = {
        DELIVER_AT: list(sampling.deliver_at or ()),
        BUNDLE_SIZE: 1 if sampling.deliver_at is None else sampling.bundle,
    }
    if sampling.grammar is not None:
        extra |= {"grammar": sampling.grammar, "grammar_tokens": sampling.grammar_tokens}
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=0 if sampling.grammar is None else 1,  # the second is the mass of the grammar
        ignore_eos=sampling.ignore_eos,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,  # nobody else uses these parameters
        extra_args=extra,
    )
