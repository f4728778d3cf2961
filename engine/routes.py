"""The experts of a mixture that a sampler chose for the positions of a token sequence.

A route belongs to an input position: in each layer that is a mixture, the ids of the experts that computed it. Routes
are kept as bytes, since a long trajectory of a large model has megabytes of them: 48 layers of 8 experts are 384 bytes
a position.

Shape legend: P positions from a sequence's first, X layers that are mixtures, E experts that a token is sent to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Octets = NDArray[np.uint8]
NARROW = 255  # up to so many experts an id takes one byte, and 255 marks a position without a route


def route_dtype(experts: int) -> np.dtype[Any]:
    """Returns the dtype of the ids of so many experts; its largest value marks a position without a route.

    >>> route_dtype(128), route_dtype(256)
    (dtype('uint8'), dtype('uint16'))
    """
    return np.dtype(np.uint8 if experts <= NARROW else np.uint16)


def absent(dtype: np.dtype[Any]) -> int:
    """Returns the id that marks a position without a route."""
    return int(np.iinfo(dtype).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """The routes of a sequence's first positions; the positions after them have none.

    octets: the ids [P, X, E] as bytes, little-endian, one byte an id or with `wide` two.

    >>> routes = Routes.of(np.array([[[0, 3]], [[2, 1]]], np.uint8))
    >>> len(routes), routes.from_position(1).ids_PXE.tolist()
    (2, [[[2, 1]]])
    """

    layers: int
    per_token: int
    octets: Octets
    wide: bool = False

    def __post_init__(self) -> None:
        if self.layers < 1 or self.per_token < 1 or len(self.octets) % self._stride:
            shape = f"{self.layers} layers of {self.per_token} experts"
            raise ValueError(f"routes of {shape} cannot have {len(self.octets)} bytes")
        self.octets.setflags(write=False)

    @classmethod
    def of(cls, ids_PXE: NDArray[Any]) -> Routes:
        """Returns the routes with these ids, uint8 or uint16."""
        _, layers, per_token = ids_PXE.shape
        assert ids_PXE.dtype in (np.uint8, np.uint16), ids_PXE.dtype
        octets = np.frombuffer(ids_PXE.tobytes(), np.uint8)
        return cls(layers=layers, per_token=per_token, octets=octets, wide=ids_PXE.dtype == np.uint16)

    @classmethod
    def join(cls, pieces: Sequence[Routes]) -> Routes | None:
        """Returns consecutive routes as one; None without a piece. Raises ValueError for pieces of several shapes."""
        if not pieces:
            return None
        kinds = {(piece.layers, piece.per_token, piece.wide) for piece in pieces}
        if len(kinds) > 1:
            raise ValueError(f"routes of one sequence have several shapes: {sorted(kinds)}")
        [(layers, per_token, wide)] = kinds
        octets = np.concatenate([piece.octets for piece in pieces])
        return cls(layers=layers, per_token=per_token, octets=octets, wide=wide)

    @property
    def _stride(self) -> int:
        return self.layers * self.per_token * (2 if self.wide else 1)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.wide else np.uint8)

    @property
    def ids_PXE(self) -> NDArray[Any]:
        """The ids; the largest value of their dtype stands in a position without a route."""
        return self.octets.view(self.dtype).reshape(-1, self.layers, self.per_token)

    def __len__(self) -> int:
        return len(self.octets) // self._stride

    def from_position(self, position: int) -> Routes:
        """Returns the routes from a position on."""
        return self._part(self.octets[position * self._stride :])

    def up_to(self, position: int) -> Routes:
        """Returns the routes before a position."""
        return self._part(self.octets[: position * self._stride])

    def none(self, positions: int) -> Routes:
        """Returns routes of the same shape, of so many positions that have none."""
        return self._part(np.full(positions * self._stride, 255, np.uint8))

    def _part(self, octets: Octets) -> Routes:
        return Routes(layers=self.layers, per_token=self.per_token, octets=octets, wide=self.wide)
