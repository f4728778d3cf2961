"""The tokens of one trajectory while it grows.

Invariants
- It is append-only: what was appended never changes, so a request may read the ids while more of them come.
- Every sampled token has a log-probability and a weight version; nothing else has. A token that a grammar decided about
  counts as given (`engine.replica.grammar_mass` says why), so nothing trains it.
- It takes eight bytes per token, since thousands of trajectories with many thousand tokens each may be alive; routes of
  a mixture's tokens come on top.
- A position keeps the first route that came for it, under which the tokens after it were sampled. A replica that
  computes it again, after a move or with new weights, may report another one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.replica.port import Delta
from engine.routes import Routes
from engine.types import Bools, Floats, Ids


class TokenBuffer:
    """Begins with the ids of the prompt. Callers may read `ids` but not change it.

    >>> buffer = TokenBuffer([5, 6])
    >>> buffer.append_sampled(Delta([7], [-0.5], "stop", version=3))
    >>> [array_T.tolist() for array_T in buffer.arrays().values()]
    [[5, 6, 7], [False, False, True], [0.0, 0.0, -0.5], [-1, -1, 3]]
    """

    __slots__ = ("_given", "_logprobs", "_routes", "_version", "_versions", "ids", "routed")

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.ids = array("i", prompt_ids)
        self._logprobs = array("f")  # those of the sampled tokens
        self._given = [(0, len(self.ids))]
        self._version = -1
        self._versions: list[tuple[int, int, int]] = []  # (version, begin, end); a later one overrides an earlier one
        self._routes: list[Routes] = []
        self.routed = 0  # positions that have a route, or never will

    @classmethod
    def of(
        cls, ids_T: Ids, sampled_T: Bools, logprobs_T: Floats, versions_T: Ids, routes: Routes | None = None
    ) -> TokenBuffer:
        """Returns the buffer whose `arrays` and `routes` these are."""
        buffer = cls(ids_T.tolist())
        buffer._logprobs.extend(logprobs_T[sampled_T].tolist())
        buffer._given = [(begin, end) for given, begin, end in _runs(~sampled_T) if given]
        buffer._versions = [run for run in _runs(versions_T) if run[0] >= 0]
        if routes is not None:
            buffer.append_routes(routes, 0)
        return buffer

    @property
    def version(self) -> int:
        """The weight version of the last sampled token; -1 before there is one."""
        return self._versions[-1][0] if self._versions else -1

    def __len__(self) -> int:
        return len(self.ids)

    def append_sampled(self, delta: Delta) -> None:
        """Appends the tokens of a delta, under its version. The caller applies its spans with `label`.

        Forced tokens count as given.
        """
        if delta.routes is not None:
            self.append_routes(delta.routes, delta.routes_from)
        assert len(delta.logprobs) == len(delta.token_ids), delta
        if delta.version != self._version:
            self._version = delta.version
            self._versions.append((delta.version, len(self.ids), -1))
        start = len(self.ids)
        self.ids.extend(delta.token_ids)
        if not any(delta.forced):
            self._logprobs.extend(delta.logprobs)
            return
        assert len(delta.forced) == len(delta.token_ids), delta
        forced_T = np.asarray(delta.forced, np.bool_)
        self._given += [(start + begin, start + end) for forced, begin, end in _runs(forced_T) if forced]
        self._logprobs.extend(np.asarray(delta.logprobs)[~forced_T].tolist())

    def append_given(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that the policy did not sample: tool responses."""
        self._given.append((len(self.ids), len(self.ids) + len(token_ids)))
        self.ids.extend(token_ids)

    def append_routes(self, routes: Routes, start: int) -> None:
        """Takes the routes of the positions from `start` on, without those of positions that have one already."""
        new = routes.from_position(max(0, self.routed - start))
        if not len(new):
            return
        if start > self.routed:
            self._routes.append(routes.none(start - self.routed))
            self.routed = start
        self._routes.append(new)
        self.routed += len(new)

    @property
    def routes(self) -> Routes | None:
        """The routes so far, as in `Trajectory`; None if none came."""
        if len(self._routes) > 1:
            self._routes = [joined] if (joined := Routes.join(self._routes)) is not None else []
        return self._routes[0] if self._routes else None

    def label(self, version: int, begin: int, end: int) -> None:
        """Gives the tokens [begin, end) this version, whatever their deltas said."""
        self._versions.append((version, begin, end))

    def arrays(self) -> dict[str, Any]:
        """Returns copies of token_ids_T, sampled_T, logprobs_T and versions_T, as in `Trajectory`."""
        size = len(self.ids)
        sampled_T = np.ones(size, np.bool_)
        for begin, end in self._given:
            sampled_T[begin:end] = False
        logprobs_T = np.zeros(size, np.float32)
        logprobs_T[sampled_T] = self._logprobs
        versions_T = np.full(size, -1, np.int32)
        for version, begin, end in self._versions:
            versions_T[begin : size if end < 0 else end] = version
        versions_T[~sampled_T] = -1
        ids_T = np.array(self.ids, np.int32)
        return {"token_ids_T": ids_T, "sampled_T": sampled_T, "logprobs_T": logprobs_T, "versions_T": versions_T}


def _runs(values_T: NDArray[Any]) -> list[tuple[int, int, int]]:
    """Returns (value, begin, end) of each stretch of equal values."""
    cuts = np.flatnonzero(np.diff(values_T)) + 1
    bounds = [0, *cuts.tolist(), len(values_T)]
    return [(int(values_T[begin]), begin, end) for begin, end in pairwise(bounds) if end > begin]
