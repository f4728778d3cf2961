"""Decides whether two formulas are equal.

Invariant: equal is exact, without a tolerance. Formulas are compared at rational points, to DIGITS digits, and proved
equal where sympy can.
"""

from __future__ import annotations

from typing import Any

import sympy

# Formulas are compared at these rational points, of both signs and sizes, without a pattern.
POINTS = ((37, 23), (-41, 29), (19, 43), (-17, 31), (53, 11))
# Formulas that are not real at some points are compared at more: neighbours of either sign, for several letters.
MORE_POINTS = (
    *POINTS,
    *((61, 67), (5, 47), (97, 7), (157, 67), (211, 97), (283, 9)),
    *((-7, 59), (-71, 73), (-89, 13), (-151, 67), (-277, 12)),
)
ENOUGH = 4  # points at which two formulas have to agree
DIGITS = 60


def same_formula(expected: Any, answer: Any) -> bool:
    """Returns whether two formulas are equal: by their values at points, and by a proof where those do not decide."""
    if expected == answer:
        return True
    if not isinstance(expected, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return False
    if expected.is_infinite or answer.is_infinite or (expected.is_Rational and answer.is_Rational):
        return False
    difference = expected - answer
    letters = sorted(difference.free_symbols, key=str)
    if not letters:
        return is_zero(difference, expected)
    decided = None if difference.has(sympy.I) else same_where_real(expected, answer, letters)
    if decided is not None:
        return decided
    seen = 0
    for start in range(len(POINTS)):
        place = {letter: point(start + index) for index, letter in enumerate(letters)}
        here, value = difference.subs(place), expected.subs(place)
        if here.has(sympy.nan, sympy.zoo, sympy.oo) or value.has(sympy.nan, sympy.zoo, sympy.oo):
            continue
        if not vanishes(here, value):
            return False
        seen += 1
    return seen >= ENOUGH or sympy.simplify(difference) == 0


def same_where_real(expected: Any, answer: Any, letters: list[Any]) -> bool | None:
    r"""Returns whether two formulas of real letters agree wherever both are real; None if too few points tell.

    An absolute value on one side means that signs count: then both must be real at the same points. So `\ln x` is not
    `\ln|x|`, but `\ln x-\ln y` is `\ln(x/y)`.
    """
    sides = [real_roots(side) for side in (expected, answer)]
    signs = any(side.has(sympy.Abs) for side in (expected, answer))
    seen = 0
    for start in range(len(MORE_POINTS)):
        if seen == start == len(POINTS):
            return True  # both were real at all of POINTS
        place = {letter: point(start + index, MORE_POINTS) for index, letter in enumerate(letters)}
        try:
            here, there = (value_at(side, place) for side in sides)
        except Undefined:
            return None
        if (here is None or there is None) and signs and here is not there:
            return False
        if here is None or there is None:
            continue
        if not vanishes(here - there, here):
            return False
        seen += 1
    return True if seen >= ENOUGH else None


def real_roots(formula: Any) -> Any:
    """Returns the formula with powers such as x^(2/3) real for negative numbers too."""
    return formula.replace(
        lambda part: part.is_Pow and part.exp.is_Rational and part.exp.q != 1 and part.exp.q % 2 == 1,
        lambda part: sympy.sign(part.base) ** part.exp.p * sympy.Abs(part.base) ** part.exp,
    )


def value_at(formula: Any, place: dict[Any, Any]) -> Any:
    """Returns the real value of a formula at a point, or None if it, or a power or function in it, is not real there.

    Raises Undefined if one of them has no value at all, such as 0^x for a negative x.
    """
    for part in (*formula.atoms(sympy.Pow, sympy.Function), formula):
        value = part.subs(place)
        if value.has(sympy.nan, sympy.zoo, sympy.oo):
            raise Undefined
        if value.has(sympy.I) or value.is_real is False:
            return None
    return value


class Undefined(Exception):
    """A formula has no value at a point."""


def point(index: int, points: tuple[tuple[int, int], ...] = POINTS) -> sympy.Rational:
    above, below = points[index % len(points)]
    return sympy.Rational(above + 7 * (index // len(points)), below)


def vanishes(difference: Any, size: Any) -> bool:
    """Returns whether a number is 0 to DIGITS digits, relative to `size`."""
    if difference == 0:
        return True
    if difference.is_Rational:
        return False
    value = abs(sympy.N(difference, DIGITS, maxn=400))
    return bool(value < sympy.Float(10, DIGITS) ** (5 - DIGITS) * (1 + abs(sympy.N(size, DIGITS))))


def is_zero(difference: Any, size: Any) -> bool:
    if not vanishes(difference, size):
        return False
    proved = difference.equals(0)
    return bool(proved) if proved is not None else bool(sympy.simplify(difference) == 0)
