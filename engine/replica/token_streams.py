"""Hands an engine's outputs to the readers of our requests, without vLLM's objects per request and per output.

vLLM's front end makes for each request a state, a detokenizer and a processor of log-probabilities, and for each output
two more objects, of which our readers use the ids. This takes the place of its output processor and adapts an interface
that may change. Requests that are not ours, such as those of the canary, go vLLM's way. It imports vLLM, so only code
that builds an engine imports it.

Outputs go to their readers straight from the socket (`engine.replica.output_reader`), AT_ONCE in each iteration of the
event loop: many that come together, as those of requests that began together do, would hold it up.

Invariants
- Each output of a request reaches its reader, in order and once; nothing comes after an end, an abort or an error.
- A request is known from the call that adds it until its reader closes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from engine.replica.output_bundler import AT_ONCE, DELIVER_AT


class TokenStream:
    """The outputs of one request. name: under which it was added. request_id: vLLM's own for it. sampled: tokens that
    have come so far.
    """

    def __init__(self, name: str, request_id: str) -> None:
        self.name = name
        self.request_id = request_id
        self.sampled = 0
        self._ready: deque[Any] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Any:
        """Waits for the next output, vLLM's EngineCoreOutput. Raises the error of an engine that failed."""
        if not self._ready and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._ready:
            return self._ready.popleft()
        assert self._error is not None
        raise self._error

    def put(self, output: Any) -> None:
        self.sampled += len(output.new_token_ids)
        self._ready.append(output)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class TokenStreams(OutputProcessor):
    """An output processor that knows our requests by `DELIVER_AT` in their SamplingParams.extra_args."""

    def __init__(self, replaced: OutputProcessor) -> None:
        """replaced: the output processor whose place this takes, before the first request."""
        self.__dict__.update(vars(replaced))
        self.log_stats = False  # the scheduler counts what a node reads (`engine.replica.scheduler`)
        self._running: dict[str, TokenStream] = {}  # by request_id; those that have not ended
        self._by_name: dict[str, TokenStream] = {}  # those that are not closed
        self._undelivered: deque[Any] = deque()

    def stream(self, name: str) -> TokenStream:
        """Returns the stream of a request that was added under this name and not closed."""
        return self._by_name[name]

    def close(self, name: str) -> str | None:
        """Forgets a request. Returns its request_id if it has not ended, so that the caller aborts it."""
        stream = self._by_name.pop(name, None)
        return stream.request_id if stream is not None and stream.request_id in self._running else None

    def sampled(self) -> dict[str, int]:
        """Returns how many tokens of each request have come, by its name."""
        return {name: stream.sampled for name, stream in self._by_name.items()}

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        parameters = request.sampling_params
        if parameters is None or DELIVER_AT not in (parameters.extra_args or {}):
            super().add_request(request, *args, **kwargs)
            return
        stream = TokenStream(request.external_req_id, request.request_id)
        self._running[stream.request_id] = self._by_name[stream.name] = stream

    @property
    def delivering(self) -> bool:
        """Whether outputs have come that their readers do not have yet."""
        return bool(self._undelivered)

    def deliver(self, outputs: Sequence[Any]) -> list[Any]:
        """Takes what an engine sent. Returns the outputs of requests that are not ours."""
        ours = [output for output in outputs if output.request_id in self._running]
        if ours and not self._undelivered:
            asyncio.get_running_loop().call_soon(self._deliver_some)
        self._undelivered += ours
        return [] if len(ours) == len(outputs) else [it for it in outputs if it.request_id not in self._running]

    def _deliver_some(self) -> None:
        self._deliver(AT_ONCE)
        if self._undelivered:
            asyncio.get_running_loop().call_soon(self._deliver_some)

    def _deliver(self, count: int) -> None:
        for _ in range(min(count, len(self._undelivered))):
            output = self._undelivered.popleft()
            stream = self._running.get(output.request_id)
            if stream is None:  # it failed meanwhile
                continue
            stream.put(output)
            if output.finish_reason is not None:
                del self._running[output.request_id]

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        self._deliver(len(self._undelivered))
        aborted, others = [], []
        for name in request_ids:
            stream = self._running.get(name) if internal else self._by_name.get(name)
            if stream is None:
                others.append(name)
            elif self._running.pop(stream.request_id, None) is not None:
                stream.put(EngineCoreOutput(stream.request_id, [], finish_reason=FinishReason.ABORT))
                aborted.append(stream.request_id)
        return [*aborted, *super().abort_requests(others, internal)]

    def propagate_error(self, e: Exception) -> None:
        self._deliver(len(self._undelivered))
        for stream in self._running.values():
            stream.fail(e)
        self._running.clear()  # there is nothing left to abort
        super().propagate_error(e)
