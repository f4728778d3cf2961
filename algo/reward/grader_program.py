"""The program that grades one answer, inside the sandbox: `algo.reward.grade_math` sends it behind
`algo.reward.grader_latex`.

Invariants
- It says "ready" after the reference is understood and before the answer is read, then one of "right", "wrong",
  "failed". Each line that it says starts with the mark that the node made for this one call.
- "wrong" is said of an answer that was compared, or that cannot be read or compared (REFUSALS). Any other exception
  (no memory, a bug of the libraries or of this file) is "failed", which says nothing about the answer.
- Right is exact: numbers have no tolerance, a tuple is no set, an end of an interval belongs to it or not, each side of
  an equation that has a value has the right one.
- A module of its own libraries that cannot be imported ends it at once: the libraries would take that for "not equal".
- Nothing of the answer is evaluated as Python but numbers: the one place in sympy where text becomes code takes
  numbers only.

Standard input: a line of JSON [mark, reference], then a line of JSON with the answer, both as `algo.reward.math_text`
has them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from types import SimpleNamespace
from typing import Any

import sympy
import sympy.physics.units  # imported by `simplify` at its first use, and itself evaluates text
from sympy import NonSquareMatrixError, ShapeError
from sympy.parsing import sympy_parser

from algo.reward.grader_latex import Items, Relation, Unreadable, real_set, understood

LIBRARIES = ("antlr4", "latex2sympy2_extended", "math_verify", "mpmath", "sympy")
# Exactly these types, not their subclasses, say that a text cannot be read or compared. Exception: all that
# Math-Verify's parser raises, without a type of its own. ValueError: sympy's constructors ("mismatched dimensions"); so
# do the two of matrices that do not fit. TypeError and NotImplementedError: comparisons that sympy does not define or
# decide. RecursionError: nested too deep. ArithmeticError's two: a division by what turns out to be 0, a huge float.
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
NUMBER = re.compile(r"(?:Integer|Float) ?\('?[0-9.eE+-]+'? ?\)")
# Where formulas are compared: rational points of both signs and sizes, without a pattern.
POINTS = ((37, 23), (-41, 29), (19, 43), (-17, 31), (53, 11))
# Those, and more for formulas that are not real at some: neighbours of either sign, for several letters.
MORE_POINTS = (
    *POINTS,
    *((61, 67), (5, 47), (97, 7), (157, 67), (211, 97), (283, 9)),
    *((-7, 59), (-71, 73), (-89, 13), (-151, 67), (-277, 12)),
)
ENOUGH = 4  # points at which two formulas have to agree
DIGITS = 60
TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}

evaluate = sympy_parser.eval_expr


def evaluate_number(code: Any, *spaces: Any) -> Any:
    """In place of sympy's eval of text, which Math-Verify reaches with the digits of a number."""
    if not isinstance(code, str) or not NUMBER.fullmatch(code):
        raise ValueError(f"not a number: {code!r}")
    return evaluate(code, *spaces)


def read(latex: str) -> list[Any]:
    r"""What a text means; with a bare \log, twice: to the base 10 and natural."""
    try:
        logarithms = (10, sympy.E) if re.search(r"\\log(?![A-Za-z]|\s*_)", latex) else (10,)
        return [understood(latex, logarithm) for logarithm in logarithms]
    except Exception as error:
        if type(error) not in REFUSALS:
            raise
        return []


def pairs(expected: list[Any], answer: list[Any]) -> list[tuple[Any, Any]]:
    r"""Meanings to compare: \log is natural only for both, or where the reference itself has a logarithm."""
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


def equal(expected: Any, answer: Any) -> bool:
    """Whether two meanings are the same; False for what it cannot compare."""
    try:
        return same(expected, answer)
    except Exception as error:
        if type(error) not in REFUSALS:
            raise
        return False


def same(expected: Any, answer: Any) -> bool:
    expected, answer = single(expected), single(answer)
    if isinstance(expected, Relation) and isinstance(answer, Relation):
        return same_relation(expected, answer)
    if isinstance(answer, Relation):
        return same_value(expected, answer)
    if isinstance(expected, Relation):
        return same_value(answer, expected)
    if isinstance(expected, sympy.Set) or isinstance(answer, sympy.Set):
        return same_set(set_of(expected), set_of(answer))
    if isinstance(expected, Items) and isinstance(answer, Items):
        return same_items(expected, answer)
    if isinstance(expected, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        return expected.shape == answer.shape and all(map(same_formula, expected, answer))
    if isinstance(expected, sympy.Expr) and isinstance(answer, sympy.Expr):
        return same_formula(expected, answer)
    return False


def single(meaning: Any) -> Any:
    """What alone stands in a set, be it written more than once; a set in a set stays there."""
    while is_set(meaning):
        items = meaning.items[:1] if len(meaning.items) == 1 else distinct(meaning.items)
        if len(items) != 1 or isinstance(items[0], sympy.Set) or is_set(items[0]):
            break
        meaning = items[0]
    return meaning


def is_set(meaning: Any) -> bool:
    return isinstance(meaning, Items) and meaning.kind == "set"


def distinct(items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Without what is there already."""
    found: list[Any] = []
    for item in items:
        if not any(same_element(other, item) for other in found):
            found.append(item)
    return tuple(found)


def same_items(expected: Items, answer: Items) -> bool:
    """A set has no order, nor have two bare lists; a tuple has, beside a bare list too. A set has each element once."""
    if "set" in (expected.kind, answer.kind):
        if {expected.kind, answer.kind} - {"set", "list", "and", "or"}:
            return False
        if same_count_and_items(expected, answer):
            return True
        expected, answer = once(expected), once(answer)
    if len(expected.items) != len(answer.items):
        return False
    if {"and", "or"} & {expected.kind, answer.kind} and any(map(is_inequality, (*expected.items, *answer.items))):
        return same_set(set_of(expected), set_of(answer))
    bare = {"list", "and", "or"}
    ordered = [kind for kind in (expected.kind, answer.kind) if kind not in bare | {"set"}]
    if not ordered:
        return matched(expected.items, answer.items)
    if len(set(ordered)) > 1 or "set" in (expected.kind, answer.kind) or (set(ordered) != {"()"} and len(ordered) == 1):
        return False
    return all(map(same_element, in_order(expected), in_order(answer)))


def same_element(expected: Any, answer: Any) -> bool:
    """Whether what stands in a list or set is the same: 2 is not {2} there."""
    return is_set(expected) == is_set(answer) and equal(expected, answer)


def same_count_and_items(expected: Items, answer: Items) -> bool:
    return len(expected.items) == len(answer.items) and matched(expected.items, answer.items)


def once(meaning: Items) -> Items:
    return Items(meaning.kind, distinct(meaning.items)) if meaning.kind == "set" else meaning


def in_order(meaning: Items) -> tuple[Any, ...]:
    """The items; of `y=3, x=5` by their names x, y, z."""
    names = [item.names[0] if isinstance(item, Relation) else None for item in meaning.items]
    if len(set(names)) == len(names) and set(names) <= set("xyz"):
        return tuple(item for _, item in sorted(zip(names, meaning.items, strict=True), key=lambda pair: str(pair[0])))
    return meaning.items


def matched(expected: tuple[Any, ...], answer: tuple[Any, ...]) -> bool:
    """Whether each has one partner of the other."""
    left = list(answer)
    for item in expected:
        partner = next((index for index, other in enumerate(left) if same_element(item, other)), None)
        if partner is None:
            return False
        del left[partner]
    return not left


def values(relation: Relation) -> list[Any]:
    """The sides of a chain of equations but for the one that names what is asked for."""
    sides, names = relation.sides, relation.names
    if names[0] is not None:
        return list(sides[1:])
    return list(sides[:-1] if names[-1] is not None else sides)


def same_value(expected: Any, relation: Relation) -> bool:
    """Whether an equation, membership or inequality says nothing but `expected`."""
    if set(relation.operators) == {"="}:
        return all(side is not None and same(expected, side) for side in values(relation))
    if relation.operators == ("in",):
        return relation.names[0] is not None and same(expected, relation.sides[1])
    if isinstance(expected, (sympy.Set, Items)):
        return same_set(set_of(expected), set_of(relation))
    return False


def same_relation(expected: Relation, answer: Relation) -> bool:
    if variable(expected) and variable(answer):
        return variable(expected) == variable(answer) and same_set(set_of(expected), set_of(answer))
    if len(expected.operators) != len(answer.operators):
        return is_equation(expected) and is_equation(answer) and same_equation(expected, answer)
    if expected.operators == answer.operators == ("=",) and is_assignment(expected):
        return same_equation(expected, answer)
    if len(expected.operators) == 1:
        return same_difference(expected, answer)
    return expected.operators == answer.operators and all(map(same, expected.sides, answer.sides))


def is_equation(relation: Relation) -> bool:
    return set(relation.operators) == {"="}


def is_assignment(relation: Relation) -> bool:
    """Whether it is a name and a value without letters."""
    value = relation.sides[1]
    return relation.names[0] is not None and not (isinstance(value, sympy.Expr) and value.free_symbols)


def same_equation(expected: Relation, answer: Relation) -> bool:
    """Whether both name the same thing, and each side with a value has the same."""
    name = expected.names[0]
    if name is None or name not in answer.names:
        return False
    return same_value(expected.sides[-1], answer)


def same_difference(expected: Relation, answer: Relation) -> bool:
    """Whether left minus right of the one is that of the other times a number, for `<` a positive one."""
    turned = {">": "<", ">=": "<="}
    operators = [turned.get(relation.operators[0], relation.operators[0]) for relation in (expected, answer)]
    differences = []
    for relation in (expected, answer):
        left, right = relation.sides
        if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr):
            return expected.names == answer.names and same(expected.sides[1], answer.sides[1])
        differences.append(right - left if relation.operators[0] in turned else left - right)
    if operators[0] != operators[1] or any(not difference.free_symbols for difference in differences):
        return False
    place = dict(zip(sorted(differences[0].free_symbols, key=str), map(point, range(5)), strict=False))
    below = differences[0].subs(place)
    ratio = differences[1].subs(place) / below if below != 0 else sympy.nan
    if not ratio.is_number or not ratio.is_finite or ratio == 0:
        return False
    if operators[0] in ("<", "<=") and not ratio.is_positive:
        return False
    return same_formula(differences[0] * ratio, differences[1])


def is_inequality(meaning: Any) -> bool:
    return isinstance(meaning, Relation) and bool(set(meaning.operators) & {"<", "<=", ">", ">=", "!="})


def variable(relation: Relation) -> Any:
    """The one letter of an inequality or membership between numbers and one formula of it; None for others."""
    if relation.operators == ("in",):
        return relation.sides[0] if isinstance(relation.sides[0], sympy.Symbol) else None
    if not is_inequality(relation) or not all(isinstance(side, sympy.Expr) for side in relation.sides):
        return None
    formulas = [side for side in relation.sides if side.free_symbols]
    if len(formulas) != 1 or len(formulas[0].free_symbols) != 1:
        return None
    letter = next(iter(formulas[0].free_symbols))
    try:
        half_line("<", formulas[0], sympy.Integer(1), letter)
    except Unreadable:
        return None
    return letter


def set_of(meaning: Any) -> sympy.Set:
    """The real numbers that a set, an interval or an inequality has."""
    meaning = single(meaning)
    if isinstance(meaning, Items) and (meaning.kind in ("and", "or") or excludes(meaning)):
        if len({variable(item) for item in meaning.items if isinstance(item, Relation)}) != 1:
            raise Unreadable("inequalities of several letters")
        sets = [set_of(item) for item in meaning.items]
        return sympy.Union(*sets) if meaning.kind == "or" else sympy.Intersection(*sets)
    if isinstance(meaning, Relation) and meaning.operators == ("in",):
        return set_of(meaning.sides[1])
    if not isinstance(meaning, Relation):
        return real_set(meaning if not isinstance(meaning, sympy.Expr) else sympy.FiniteSet(meaning))
    letter = variable(meaning)
    if letter is None:
        raise Unreadable("no inequality of one letter")
    result: sympy.Set = sympy.S.Reals
    position = next(index for index, side in enumerate(meaning.sides) if side.free_symbols)
    for index, operator in enumerate(meaning.operators):
        if index not in (position - 1, position):
            raise Unreadable("a chain that compares numbers")
        number = meaning.sides[index] if index == position - 1 else meaning.sides[index + 1]
        if index == position - 1:  # number < letter
            operator = TURNED.get(operator, operator)
        result = sympy.Intersection(result, half_line(operator, meaning.sides[position], number, letter))
    return result


def excludes(meaning: Items) -> bool:
    r"""Whether a list is inequalities that all hold: `x < 1, x \\neq -2`."""
    every = meaning.kind == "list" and all(map(is_inequality, meaning.items))
    return every and any("!=" in item.operators for item in meaning.items)


def half_line(operator: str, formula: Any, number: Any, letter: Any) -> sympy.Set:
    """Where `formula operator number`, for a formula that is linear in the letter or in one absolute value of such."""
    if formula == letter:
        return ray(operator, number)
    bars = [part for part in formula.atoms(sympy.Abs) if letter in part.free_symbols]
    inner = sympy.Dummy(real=True) if bars else letter
    if len(bars) > 1:
        raise Unreadable("several absolute values")
    linear = formula.subs(bars[0], inner) if bars else formula
    slope = sympy.diff(linear, inner)
    if slope.free_symbols or linear.free_symbols - {inner} or not (slope.is_positive or slope.is_negative):
        raise Unreadable("no linear inequality")
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
    mine, theirs = pieces(expected), pieces(answer)
    return len(mine) == len(theirs) and all(map(same_piece, mine, theirs))


def pieces(numbers: sympy.Set) -> list[Any]:
    """The intervals and single numbers of a set in their order, each once."""
    ordered = sorted(parts(numbers), key=place_of)
    return [piece for before, piece in zip([None, *ordered], ordered, strict=False) if not same_piece(before, piece)]


def parts(numbers: sympy.Set) -> list[Any]:
    if isinstance(numbers, sympy.Union):
        return [piece for part in numbers.args for piece in parts(part)]
    return list(numbers.args) if isinstance(numbers, sympy.FiniteSet) else [numbers]


def place_of(piece: Any) -> tuple[Any, ...]:
    """By what pieces are sorted, equal ones beside each other however they are written."""
    if isinstance(piece, sympy.Interval):
        return (0, float_of(piece.start), 0.0, 1)
    if isinstance(piece, sympy.Expr) and piece.is_number:
        value = sympy.N(piece, DIGITS)
        return (0, float_of(sympy.re(value)), float_of(sympy.im(value)), 0)
    return (1, 0.0, 0.0, str(piece))


def float_of(number: Any) -> Any:
    """Rounded by its last digits, which depend on how a number is written."""
    return sympy.Float(sympy.N(number, DIGITS), DIGITS - 10) if number.is_finite else sympy.N(number)


def same_piece(expected: Any, answer: Any) -> bool:
    if isinstance(expected, sympy.Interval) and isinstance(answer, sympy.Interval):
        ends = (expected.left_open, expected.right_open) == (answer.left_open, answer.right_open)
        return ends and same_formula(expected.start, answer.start) and same_formula(expected.end, answer.end)
    if isinstance(expected, sympy.Expr) and isinstance(answer, sympy.Expr):
        return same_formula(expected, answer)
    return bool(expected == answer)


def same_formula(expected: Any, answer: Any) -> bool:
    """Exactly equal: first seen at points where both have a value, to DIGITS digits, then proved where sympy can."""
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
    r"""Whether two formulas of real letters agree where both are real; None where too few points say so.

    A side with an absolute value cares for signs: beside it the other has to be real at the same points. So `\ln x` is
    not `\ln|x|`, but `\ln x-\ln y` is `\ln(x/y)`.
    """
    sides = [real_roots(side) for side in (expected, answer)]
    signs = any(side.has(sympy.Abs) for side in (expected, answer))
    seen = 0
    for start in range(len(MORE_POINTS)):
        if seen == start == len(POINTS):
            return True  # real at all of the first ones
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
    """With powers such as x^(2/3) real for negative numbers too."""
    return formula.replace(
        lambda part: part.is_Pow and part.exp.is_Rational and part.exp.q != 1 and part.exp.q % 2 == 1,
        lambda part: sympy.sign(part.base) ** part.exp.p * sympy.Abs(part.base) ** part.exp,
    )


def value_at(formula: Any, place: dict[Any, Any]) -> Any:
    """The real number that a formula has at a point; None where it, or a power or function in it, is not real.

    Raises Undefined where one of them has no value at all, as 0^x has none for a negative x.
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
    """Whether a number is 0 to DIGITS digits of another's size."""
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


def main() -> None:
    mark, reference = json.loads(sys.stdin.readline())

    def lacking(name: str, *_: Any) -> None:
        """Asked last where a module is."""
        if name.startswith(tuple(f"{library}." for library in LIBRARIES)):
            print(mark, "lacks", name, flush=True)
            os._exit(1)

    sys.meta_path.append(SimpleNamespace(find_spec=lacking))
    sympy_parser.eval_expr = evaluate_number
    expected = read(reference)
    print(mark, "ready", flush=True)
    try:
        answer = read(json.loads(sys.stdin.readline()))
        right = any(equal(*pair) for pair in pairs(expected, answer))
    except BaseException as error:  # SystemExit too
        print(mark, "failed", *f"{type(error).__name__}: {error}"[:200].split(), flush=True)
        os._exit(1)
    print(mark, "right" if right else "wrong")


if __name__ == "__main__":
    main()
