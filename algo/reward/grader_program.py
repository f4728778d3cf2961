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
from itertools import permutations
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
DIGITS = 60

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
    """What alone stands in a set."""
    while isinstance(meaning, Items) and meaning.kind == "set" and len(meaning.items) == 1:
        meaning = meaning.items[0]
    return meaning


def same_items(expected: Items, answer: Items) -> bool:
    """A set has no order, nor have two bare lists; a tuple has, beside a bare list too."""
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
    return all(map(same, in_order(expected), in_order(answer)))


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
        partner = next((index for index, other in enumerate(left) if equal(item, other)), None)
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
    """The one letter of an inequality or membership between numbers; None for others."""
    if relation.operators == ("in",):
        return relation.sides[0] if isinstance(relation.sides[0], sympy.Symbol) else None
    if not is_inequality(relation):
        return None
    letters = [side for side in relation.sides if isinstance(side, sympy.Symbol)]
    others = [side for side in relation.sides if isinstance(side, sympy.Expr) and not side.free_symbols]
    return letters[0] if len(letters) == 1 and len(others) == len(relation.sides) - 1 else None


def set_of(meaning: Any) -> sympy.Set:
    """The real numbers that a set, an interval or an inequality has."""
    meaning = single(meaning)
    if isinstance(meaning, Items) and meaning.kind in ("and", "or"):
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
    position = meaning.sides.index(letter)
    for index, operator in enumerate(meaning.operators):
        if index not in (position - 1, position):
            raise Unreadable("a chain that compares numbers")
        number = meaning.sides[index] if index == position - 1 else meaning.sides[index + 1]
        if index == position - 1:  # number < letter
            operator = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}.get(operator, operator)
        result = sympy.Intersection(result, half_line(operator, number))
    return result


def half_line(operator: str, number: Any) -> sympy.Set:
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
    return len(mine) == len(theirs) and any(
        all(map(same_piece, mine, order)) for order in permutations(theirs) if len(mine) <= 6
    )


def pieces(numbers: sympy.Set) -> list[Any]:
    if isinstance(numbers, sympy.Union):
        return [piece for part in numbers.args for piece in pieces(part)]
    return list(numbers.args) if isinstance(numbers, sympy.FiniteSet) else [numbers]


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
    seen = 0
    for start in range(len(POINTS)):
        place = {letter: point(start + index) for index, letter in enumerate(letters)}
        here, value = difference.subs(place), expected.subs(place)
        if here.has(sympy.nan, sympy.zoo, sympy.oo) or value.has(sympy.nan, sympy.zoo, sympy.oo):
            continue
        if not vanishes(here, value):
            return False
        seen += 1
    return seen >= 4 or sympy.simplify(difference) == 0


def point(index: int) -> sympy.Rational:
    above, below = POINTS[index % len(POINTS)]
    return sympy.Rational(above + 7 * (index // len(POINTS)), below)


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
