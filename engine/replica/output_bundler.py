"""Streams tokens out of an engine in bundles. Pure: the outputs of a step go in, those that are due come out.

What leaves costs the node's event loop about the same whether it is one token or 64 (`rocstar bench loop`).

Invariants
- A request's tokens leave in their order, and all of them before its end.
- Fewer tokens of a request wait than its `bundle`, and none that its reader must see at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Keys of SamplingParams.extra_args: what `OutputBundler.add` takes. Requests that have them are ours.
DELIVER_AT, BUNDLE_SIZE = "deliver_at", "bundle"
AT_ONCE = 4  # outputs that reach their readers in one iteration of the node's event loop; more would hold it up
LOGPROBS, BEGAN = "logprobs", "began"  # keys of an output's kv_transfer_params


@dataclass(slots=True)
class _Request:
    """A request with what is held of it. last: the newest held output. logprobs: a list for each column. began: when
    its first token came, until that has left. prefill: what vLLM said of its prefill, likewise. routes: the routes that
    vLLM has reported, on GPUs.
    """

    deliver_at: frozenset[int]
    bundle: int
    logprobs: tuple[list[float], ...]
    tokens: list[int] = field(default_factory=list)
    last: Any = None
    began: float | None = None
    prefill: Any = None
    begun: bool = False
    routes: list[NDArray[Any]] = field(default_factory=list)

    def hold(self, output: Any, now: float) -> None:
        if not self.begun and output.new_token_ids:
            self.begun, self.began = True, now
        self.prefill = self.prefill or output.prefill_stats
        self.last = output
        self.tokens += output.new_token_ids
        if output.routed_experts is not None:
            self.routes.append(output.routed_experts)
        if output.new_logprobs is not None:
            for column, values in enumerate(self.logprobs):
                values += output.new_logprobs.logprobs[:, column].tolist()

    def release(self) -> Any:
        """Returns the newest output with all that is held, which is held no longer."""
        output, self.last = self.last, None
        output.new_token_ids, self.tokens = self.tokens, []
        output.new_logprobs, output.kv_transfer_params = None, {LOGPROBS: self.logprobs}
        if self.began is not None:
            output.kv_transfer_params[BEGAN], self.began = self.began, None
        output.prefill_stats, self.prefill = self.prefill, None
        self.logprobs = tuple([] for _ in self.logprobs)
        output.routed_experts = np.concatenate(self.routes) if self.routes else None
        self.routes = []
        return output


class OutputBundler:
    """Holds outputs (vLLM's EngineCoreOutput) of the requests that were added. Those of other requests pass.

    What leaves has its log-probabilities as lists of floats in `kv_transfer_params[LOGPROBS]`: one list, and with
    `masses` one of the log-masses of a grammar (`engine.replica.grammar_mass`). Decoding the arrays that vLLM sends
    would cost the node a third of what it pays for a bundle. The first that leaves has in `kv_transfer_params[BEGAN]`
    when the first token came.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}

    def add(self, request_id: str, deliver_at: Iterable[int], bundle: int, *, masses: bool = False) -> None:
        """Adds a request. deliver_at, bundle: see `engine.replica.port.Sampling`."""
        self._requests[request_id] = _Request(frozenset(deliver_at), bundle, ([], []) if masses else ([],))

    def forget(self, request_id: str) -> None:
        """Drops an aborted request."""
        self._requests.pop(request_id, None)

    def __len__(self) -> int:
        """Returns the number of requests with held outputs."""
        return sum(request.last is not None for request in self._requests.values())

    def push(self, outputs: Iterable[Any], now: float = 0.0) -> list[Any]:
        """Returns those of a step's outputs that are due, each with all that was held of its request. now: the time."""
        return [output for output in outputs if self._due(output, now)]

    def flush(self) -> list[Any]:
        """Returns everything that is held, and holds it no longer."""
        return [request.release() for request in self._requests.values() if request.last is not None]

    def _due(self, output: Any, now: float) -> bool:
        request = self._requests.get(output.request_id)
        if request is None:
            return True
        request.hold(output, now)
        early = output.finish_reason is None and len(request.tokens) < request.bundle
        if early and request.deliver_at.isdisjoint(output.new_token_ids):
            return False
        request.release()
        if output.finish_reason is not None:
            del self._requests[output.request_id]
        return True
