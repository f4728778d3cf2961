"""Keeps the routes of all tokens that an engine on the CPU has in its KV cache, and reads those of a request.

A token's route is kept where its keys and values are: by the slot of the cache. So a request whose prefix is cached,
which another request computed, finds the routes of that prefix too.

Invariants
- A request's routes are read once and in order. They are read before its blocks are freed, so what a preempted request
  computed the first time is what is reported.
- A position whose slot is gone has no route. Slots behind a sliding window go, so those of layers that see all tokens
  are taken where there are any.

Shape legend: S slots, P positions, L tokens of an engine step, X layers that are mixtures, E experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.routes import absent, route_dtype

ROUTES_FROM = "routes_from"  # key of SamplingParams.extra_args: the first position whose route is wanted


class RouteSlots:
    """The routes by slot. block_size: slots of a block. group: the place among the cache's groups of layers, which have
    blocks of their own, of the one whose slots are taken.
    """

    def __init__(
        self, *, blocks: int, block_size: int, layers: int, per_token: int, experts: int, group: int = 0
    ) -> None:
        dtype = route_dtype(experts)
        self.block_size, self.group = block_size, group
        # The last one takes what padding writes, whose slot is -1.
        self._ids_SXE = np.full((blocks * block_size + 1, layers, per_token), absent(dtype), dtype)

    def write(self, layer: int, slots_L: NDArray[np.int64], ids_LE: NDArray[Any]) -> None:
        """Keeps what a layer chose for the tokens of a step."""
        self._ids_SXE[slots_L[: len(ids_LE)], layer] = ids_LE

    def read(self, blocks: Sequence[int], start: int, end: int) -> NDArray[Any]:
        """Returns the routes of the positions [start, end) of a request with these blocks, [P, X, E]."""
        positions_P = np.arange(start, end)
        blocks_P = np.asarray(blocks, np.int64)[positions_P // self.block_size]
        return self._ids_SXE[blocks_P * self.block_size + positions_P % self.block_size]


class _Reading:
    """What was read of a request and has not left. next: the first position that was not read."""

    __slots__ = ("next", "pieces")

    def __init__(self, start: int) -> None:
        self.next = start
        self.pieces: list[NDArray[Any]] = []


class RouteReader:
    """Reads the routes of requests.

    >>> slots = RouteSlots(blocks=2, block_size=2, layers=1, per_token=1, experts=8)
    >>> slots.write(0, np.array([2, 3]), np.array([[5], [7]]))
    >>> reader = RouteReader(slots)
    >>> reader.begin("a", 1)
    >>> reader.read("a", [1], 2)
    >>> reader.release("a").tolist(), reader.release("a")
    ([[[7]]], None)
    """

    def __init__(self, slots: RouteSlots) -> None:
        self._slots = slots
        self._readings: dict[str, _Reading] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._readings

    @property
    def group(self) -> int:
        """Returns which of a request's lists of blocks, one for each group of layers, `read` takes."""
        return self._slots.group

    def begin(self, request_id: str, start: int) -> None:
        """Begins with a request whose routes are wanted from position `start` on."""
        self._readings[request_id] = _Reading(start)

    def read(self, request_id: str, blocks: Sequence[int], end: int) -> None:
        """Reads the routes up to position `end` that were not read yet. blocks: those that the request has."""
        reading = self._readings[request_id]
        if end > reading.next:
            reading.pieces.append(self._slots.read(blocks, reading.next, end))
            reading.next = end

    def release(self, request_id: str) -> NDArray[Any] | None:
        """Returns what was read since the last call, [P, X, E]; None if that is nothing."""
        reading = self._readings[request_id]
        pieces, reading.pieces = reading.pieces, []
        if len(pieces) <= 1:
            return pieces[0] if pieces else None
        return np.concatenate(pieces)

    def forget(self, request_id: str) -> None:
        """Ends with a request; does nothing for one that is not known."""
        self._readings.pop(request_id, None)
