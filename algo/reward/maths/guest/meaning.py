"""The meaning of a text, between its reader (`reader`) and its comparison (`compare`).

A meaning is a sympy expression, matrix or set, or Items or a Relation of meanings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sympy import NonSquareMatrixError, ShapeError


class Unreadable(ValueError):
    """The text is not mathematics, or could mean several things."""


# Exactly these types, not their subclasses, mean that a text cannot be read or compared. Math-Verify's parser raises
# plain Exception. sympy's constructors raise ValueError ("mismatched dimensions"), and the two matrix errors for shapes
# that do not fit; its comparisons raise TypeError and NotImplementedError where they are not defined or not decided.
# RecursionError means nested too deep; ZeroDivisionError and OverflowError, a divisor that turns out to be 0 and a huge
# float.
REFUSALS = (
    Unreadable,
    Exception,
    ValueError,
    TypeError,
    NotImplementedError,
    RecursionError,
    ZeroDivisionError,
    OverflowError,
    ShapeError,
    NonSquareMatrixError,
)


@dataclass(frozen=True)
class Items:
    """Several meanings. kind: "list" (without brackets), "and", "or", "set", or both brackets of a tuple or interval.

    `(1, 2]` is Items("(]", (1, 2)).
    """

    kind: str
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Relation:
    """A chain `sides[0] operators[0] sides[1] ...`. names[i]: the text of side i if that only names something.

    `x = 5` is Relation(("=",), (x, 5), ("x", None)).
    """

    operators: tuple[str, ...]
    sides: tuple[Any, ...]
    names: tuple[str | None, ...]
