"""The interface between the fleet and a replica. Imports neither torch nor vLLM.

`engine.replica.replica.Replica` implements it with a vLLM engine, `tests.support.fakes.ScriptedReplica` with a script.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from engine.routes import Routes
from engine.types import Floats, TokenScores
from sandbox.require import at_least, require, within

SEEDS = 1 << 63  # seeds must be below this, for an engine dies of a larger one
MOST_TOP = 20  # tokens that an engine lists for one position
BUNDLE = 64  # tokens that an engine delivers together if none is wanted early; a move or an abort loses fewer
_POSITIVE, _NOT_NEGATIVE = at_least(1), at_least(0)  # made once: a Sampling is made twice for each turn
_TEMPERATURE, _SHARE = within("[0, inf)"), within("(0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How one turn is sampled. Raises ValueError for numbers that an engine would refuse or die of.

    max_tokens: bound of the turn. seed: one per (run, prompt, sample, turn). ignore_eos: the model's own end token does
    not end the turn, so that a bench can replay a length. deliver_at: tokens that are delivered as they come; others
    may wait for one of these. None: none waits. bundle: fewer tokens than this may wait;
    a larger bundle costs the node less. version: the adapter version to sample with; None: the newest. routes_from:
    the first position whose route is wanted, for replicas that report routes.
    """

    max_tokens: int
    temperature: float
    seed: int | None
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool = False
    deliver_at: frozenset[int] | None = None
    top_p: float = 1.0
    bundle: int = BUNDLE
    version: int | None = None
    grammar: str | None = None
    grammar_tokens: int = 0
    routes_from: int = 0

    def __post_init__(self) -> None:
        require("max_tokens", self.max_tokens, _POSITIVE)
        require("temperature", self.temperature, _TEMPERATURE)
        require("top_p", self.top_p, _SHARE)
        require("grammar_tokens", self.grammar_tokens, _NOT_NEGATIVE)
        if self.seed is not None and not 0 <= self.seed < SEEDS:
            raise ValueError(f"seed must be from 0 to {SEEDS - 1}, got {self.seed}")


@dataclass(frozen=True, slots=True)
class Delta:
    """One or more tokens as a replica produced them. finish is set on the last delta: "stop", "length" or "abort".

    version: the replica's weight version now. spans: on the last delta, (version, start, end) over all tokens of the
    request, exact also if weights were updated during it. began: on the first delta, when its first token was sampled
    (`engine.clock`), if the replica says so. logprobs: the model's own, whether or not a grammar ruled
    tokens out. forced: of each token, whether the grammar decided about it rather than the model
    (`engine.replica.grammar_mass`); () for a turn without a grammar. routes: the routes of the positions from
    routes_from on, up to the last but one of the sequence after this delta; None from a replica that reports none.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str | None = None
    cached_tokens: int = 0
    version: int = 0
    spans: Sequence[tuple[int, int, int]] = ()
    forced: Sequence[bool] = ()
    began: float | None = None
    routes: Routes | None = None
    routes_from: int = 0

    def without_first(self, tokens: int) -> Delta:
        """Returns the delta without its first tokens, and with its spans as they are."""
        return replace(
            self, token_ids=self.token_ids[tokens:], logprobs=self.logprobs[tokens:], forced=self.forced[tokens:]
        )

    def up_to(self, tokens: int) -> Delta:
        """Returns the delta with only its first tokens, and with its spans as they are."""
        routes = self.routes
        if routes is not None:
            routes = routes.up_to(max(0, len(routes) - len(self.token_ids[tokens:])))
        return replace(
            self,
            token_ids=self.token_ids[:tokens],
            logprobs=self.logprobs[:tokens],
            forced=self.forced[:tokens],
            routes=routes,
        )


@dataclass(frozen=True, slots=True)
class KvSample:
    """State of an engine at the end of a step: free blocks (evictable ones included), running and waiting requests.

    preempted: requests that lost their blocks. prefilled: prompt tokens that were computed, those of preempted requests
    and lost prefixes included. steps: how many steps the sample stands for, since an engine does not report each of its
    steps (`engine.replica.step_reports`), nor does a simulator; preempted and prefilled are sums over them.
    """

    free_blocks: int
    running: int
    waiting: int
    preempted: int
    prefilled: int = 0
    steps: int = 1


class Generator(Protocol):
    """Continues a token sequence.

    class Echo:  # samples the end-of-turn token at once
        def generate(self, token_ids, sampling, request_id):
            return self._stream()
        async def _stream(self):
            yield Delta([2], [0.0], finish="stop")
    """

    def generate(self, token_ids: Sequence[int], sampling: Sampling, request_id: str) -> AsyncGenerator[Delta, None]:
        """Yields deltas until one has `finish`. Closing the generator aborts the request.

        Raises ReplicaDied when the engine is gone, and GrammarRefused.
        """
        ...


class ReplicaDied(RuntimeError):
    """The engine behind a generator is dead; the request can continue elsewhere from its tokens."""


class GrammarRefused(ValueError):
    """The engine cannot sample by the grammar of a request. It goes on serving; the message says why."""


class ReplicaMisconfigured(ReplicaDied):
    """The engine did not start, and another attempt would fail in the same way: its settings are wrong."""


class ReplicaPort(Protocol):
    """An engine as the fleet uses it. Its methods raise ReplicaDied when the engine is gone."""

    index: int
    died: asyncio.Event
    in_flight: int
    pid: int

    @property
    def usable_blocks(self) -> int: ...

    @property
    def cause(self) -> str:
        """Why the engine died, as far as that is known, or empty. Must be read before `shutdown`."""
        ...

    async def start(self) -> None:
        """Starts the engine. Raises ReplicaMisconfigured if another attempt would fail in the same way."""
        ...

    def generate(
        self, token_ids: Sequence[int], sampling: Sampling, request_id: str
    ) -> AsyncGenerator[Delta, None]: ...

    async def abort(self, request_id: str) -> None:
        """Ends a request: its stream ends with finish "abort" after the tokens it has. Does nothing if it has ended."""
        ...

    async def update_weights(self, path: str, version: int) -> None: ...

    async def sleep(self) -> None:
        """Gives up what it holds of a shared device. No request may be in flight, nor come before it is awake."""
        ...

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Takes one part back: first the weights, which hold nothing until the next update, then the KV cache."""
        ...

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> Floats: ...

    async def score(self, token_ids: Sequence[int], start: int, top: int = 0) -> TokenScores:
        """Returns the log-probabilities of the tokens from `start` (1 or more) on under the engine's weights, and the
        `top` likeliest tokens at each of their positions, at most MOST_TOP.
        """
        ...

    def stalled(self, now: float) -> str | None:
        """Returns why the engine must be killed and replaced, or None if it serves or has nothing to do."""
        ...

    def kill(self) -> None: ...

    async def shutdown(self) -> None: ...
