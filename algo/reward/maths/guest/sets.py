"""Sets of real numbers: where an inequality holds, and whether two sets are equal."""

from __future__ import annotations

from typing import Any

import sympy

from algo.reward.maths.guest.formulas import DIGITS, same_formula
from algo.reward.maths.guest.meaning import Unreadable

TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def half_line(operator: str, formula: Any, number: Any, letter: Any) -> sympy.Set:
    """Returns where `formula operator number` holds, if the formula is linear in the letter or one absolute value."""
    if formula == letter:
        return ray(operator, number)
    bars = [part for part in formula.atoms(sympy.Abs) if letter in part.free_symbols]
    inner = sympy.Dummy(real=True) if bars else letter
    if len(bars) > 1:
        raise Unreadable("several absolute values")
    linear = formula.subs(bars[0], inner) if bars else formula
    slope = sympy.diff(linear, inner)
    if slope.free_symbols or linear.free_symbols - {inner} or not (slope.is_positive or slope.is_negative):
        raise Unreadable("an inequality that is not linear")
    bound = (number - linear.subs(inner, 0)) / slope
    if slope.is_negative:
        operator = TURNED.get(operator, operator)
    if not bars:
        return ray(operator, bound)
    if bound.is_negative:
        return sympy.S.EmptySet if operator in ("<", "<=") else sympy.S.Reals
    above = half_line(operator, bars[0].args[0], bound, letter)
    below = half_line(TURNED.get(operator, operator), bars[0].args[0], -bound, letter)
    return sympy.Union(above, below) if operator in (">", ">=") else sympy.Intersection(above, below)


def ray(operator: str, number: Any) -> sympy.Set:
    if operator in (">", ">="):
        return sympy.Interval(number, sympy.oo, operator == ">", True)
    if operator in ("<", "<="):
        return sympy.Interval(-sympy.oo, number, True, operator == "<")
    if operator == "!=":
        return sympy.Complement(sympy.S.Reals, sympy.FiniteSet(number))
    raise Unreadable(operator)


def same_set(expected: sympy.Set, answer: sympy.Set) -> bool:
    if expected == answer:
        return True
    wanted, given = pieces(expected), pieces(answer)
    return len(wanted) == len(given) and all(map(same_piece, wanted, given))


def pieces(numbers: sympy.Set) -> list[Any]:
    """Returns the intervals and single numbers of a set in order, each once."""
    ordered = sorted(parts(numbers), key=place_of)
    return [piece for before, piece in zip([None, *ordered], ordered, strict=False) if not same_piece(before, piece)]


def parts(numbers: sympy.Set) -> list[Any]:
    if isinstance(numbers, sympy.Union):
        return [piece for part in numbers.args for piece in parts(part)]
    return list(numbers.args) if isinstance(numbers, sympy.FiniteSet) else [numbers]


def place_of(piece: Any) -> tuple[Any, ...]:
    """Returns the key by which pieces are sorted: equal ones become neighbours, however they are written."""
    if isinstance(piece, sympy.Interval):
        return (0, float_of(piece.start), 0.0, 1)
    if isinstance(piece, sympy.Expr) and piece.is_number:
        value = sympy.N(piece, DIGITS)
        return (0, float_of(sympy.re(value)), float_of(sympy.im(value)), 0)
    return (1, 0.0, 0.0, str(piece))


def float_of(number: Any) -> Any:
    """Returns a number without its last digits, which depend on how it is written."""
    return sympy.Float(sympy.N(number, DIGITS), DIGITS - 10) if number.is_finite else sympy.N(number)


def same_piece(expected: Any, answer: Any) -> bool:
    if isinstance(expected, sympy.Interval) and isinstance(answer, sympy.Interval):
        ends = (expected.left_open, expected.right_open) == (answer.left_open, answer.right_open)
        return ends and same_formula(expected.start, answer.start) and same_formula(expected.end, answer.end)
    if isinstance(expected, sympy.Expr) and isinstance(answer, sympy.Expr):
        return same_formula(expected, answer)
    return bool(expected == answer)
