"""The tokens of one request, on their way from vLLM's output task to the task that waits for them.

Invariants
- Every token that came before the end of the engine is delivered before that end is told.
- The tokens of a delta were sampled by one version, as far as the node knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from typing import Any

from engine.ports import Delta

HELD = 64  # tokens that are held back at most


class TokenStream:
    """Takes the place of vLLM's own collector, which wakes a task for every token: most of what a token costs the node.

    deliver_at: see `engine.ports.Sampling`; the first token and every HELD-th wake the reader too. version: the
    replica's, now.
    """

    __slots__ = ("_cached_tokens", "_deliver_at", "_error", "_finish", "_held", "_ids", "_logprobs", "_parts")
    __slots__ += ("_ready", "_spans", "_version", "_version_now")

    def __init__(self, deliver_at: Set[int] | None, version: Callable[[], int]) -> None:
        self._deliver_at = deliver_at
        self._version_now = version
        self._ready = asyncio.Event()
        self._error: Exception | None = None
        self._finish: str | None = None
        self._spans: list[tuple[int, int, int]] = []
        self._cached_tokens = 0
        self._parts: list[Delta] = []  # of versions before the last
        self._version = version()
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._held = HELD - 1

    def attach(self, collector: Any) -> None:
        """collector: vLLM's RequestOutputCollector of the request; it may hold an output already."""
        collector.put = self.put
        if collector.output is not None:
            self.put(collector.output)

    def put(self, output: Any) -> None:
        """output: vLLM's RequestOutput, or the exception that ended the engine."""
        if isinstance(output, Exception):
            self._error = output
            self._ready.set()
            return
        part = output.outputs[0]
        if self._version != self._version_now():
            self._cut()
        self._ids += part.token_ids
        self._logprobs += [next(iter(position.values())).logprob for position in part.logprobs or ()]
        self._held += len(part.token_ids)
        self._cached_tokens = output.num_cached_tokens or 0
        if part.finish_reason:
            self._finish, self._spans = part.finish_reason, _numbered(part.weight_versions)
        elif self._held < HELD and self._deliver_at is not None and self._deliver_at.isdisjoint(part.token_ids):
            return
        self._ready.set()

    async def next(self) -> list[Delta]:
        """What has come since the last call; the last one has `finish`. Raises the exception that ended the engine."""
        await self._ready.wait()
        if self._error is None:
            self._ready.clear()
        self._held = 0
        self._cut()
        parts, self._parts = self._parts, []
        if self._error is not None and not parts:
            raise self._error
        return parts

    def _cut(self) -> None:
        if self._ids or self._finish is not None:
            ids, logprobs, self._ids, self._logprobs = self._ids, self._logprobs, [], []
            self._parts.append(
                Delta(ids, logprobs, self._finish, self._cached_tokens, self._version, tuple(self._spans))
            )
        self._version = self._version_now()


def _numbered(versions: Any) -> list[tuple[int, int, int]]:
    """vLLM's spans; a label that is not a number is the engine's own before the first update."""
    return [(int(span.version), span.start, span.end) for span in versions or () if span.version.isdigit()]
