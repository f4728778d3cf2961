r"""Judges an answer strictly: it must be readable as a whole, and exactly equal to the reference.

Invariants
- An answer is wrong if it was compared and differs, or if it cannot be read or compared (`meaning.REFUSALS`).
- A bare \log has base 10, or base e on both sides at once, or base e where the reference has a logarithm itself.
"""

from __future__ import annotations

import re
from typing import Any

import sympy

from algo.reward.maths.guest.compare import equal
from algo.reward.maths.guest.meaning import REFUSALS, Items, Relation
from algo.reward.maths.guest.reader import understood
from algo.reward.maths.guest.verdict import grade


def read(latex: str) -> list[Any]:
    r"""Returns the meaning of a text: none if it cannot be read, two if it has a bare \log (base 10 and base e)."""
    try:
        logarithms = (10, sympy.E) if re.search(r"\\log(?![A-Za-z]|\s*_)", latex) else (10,)
        return [understood(latex, logarithm) for logarithm in logarithms]
    except Exception as error:
        if type(error) not in REFUSALS:
            raise
        return []


def same(expected: list[Any], answer: list[Any]) -> bool:
    return any(equal(*pair) for pair in pairs(expected, answer))


def pairs(expected: list[Any], answer: list[Any]) -> list[tuple[Any, Any]]:
    """Returns the pairs of meanings of which one has to be equal."""
    if len(expected) == len(answer) == 2:
        return list(zip(expected, answer, strict=True))
    if len(answer) == 2 and not (expected and has_logarithm(expected[0])):
        answer = answer[:1]
    return [(one, other) for one in expected for other in answer]


def has_logarithm(meaning: Any) -> bool:
    if isinstance(meaning, Items):
        return any(map(has_logarithm, meaning.items))
    if isinstance(meaning, Relation):
        return any(map(has_logarithm, meaning.sides))
    return isinstance(meaning, sympy.Basic) and bool(meaning.has(sympy.log))


def main() -> None:
    grade(read, same)
