"""Decides whether two meanings are the same.

Invariants
- A tuple has an order, a set and a bare list have none; an end of an interval belongs to it or not.
- Each side of an equation that has a value must have the right one.
"""

from __future__ import annotations

from typing import Any

import sympy

from algo.reward.maths.guest.formulas import point, same_formula
from algo.reward.maths.guest.meaning import REFUSALS, Items, Relation, Unreadable
from algo.reward.maths.guest.reader import real_set
from algo.reward.maths.guest.sets import TURNED, half_line, same_set


def equal(expected: Any, answer: Any) -> bool:
    """Returns whether two meanings are the same; False if they cannot be compared."""
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
    """Returns the only element of a set, even if it is written more than once; a set within a set stays."""
    while is_set(meaning):
        items = meaning.items[:1] if len(meaning.items) == 1 else distinct(meaning.items)
        if len(items) != 1 or isinstance(items[0], sympy.Set) or is_set(items[0]):
            break
        meaning = items[0]
    return meaning


def is_set(meaning: Any) -> bool:
    return isinstance(meaning, Items) and meaning.kind == "set"


def distinct(items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the items without repetitions."""
    seen: list[Any] = []
    for item in items:
        if not any(same_element(other, item) for other in seen):
            seen.append(item)
    return tuple(seen)


def same_items(expected: Items, answer: Items) -> bool:
    """Returns whether the items agree: in order beside a tuple, otherwise in any order, and each once in a set."""
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
    """Returns whether two elements of lists or sets are the same; there 2 is not {2}."""
    return is_set(expected) == is_set(answer) and equal(expected, answer)


def same_count_and_items(expected: Items, answer: Items) -> bool:
    return len(expected.items) == len(answer.items) and matched(expected.items, answer.items)


def once(meaning: Items) -> Items:
    """Returns a set without repetitions, anything else as it is."""
    return Items(meaning.kind, distinct(meaning.items)) if meaning.kind == "set" else meaning


def in_order(meaning: Items) -> tuple[Any, ...]:
    """Returns the items, sorted by name if they are equations for x, y, z: `y=3, x=5` is (5, 3)."""
    names = [item.names[0] if isinstance(item, Relation) else None for item in meaning.items]
    if len(set(names)) == len(names) and set(names) <= set("xyz"):
        return tuple(item for _, item in sorted(zip(names, meaning.items, strict=True), key=lambda pair: str(pair[0])))
    return meaning.items


def matched(expected: tuple[Any, ...], answer: tuple[Any, ...]) -> bool:
    """Returns whether each expected item can be paired with an answer of its own, and no answer is left over."""
    unpaired = list(answer)
    for item in expected:
        partner = next((index for index, other in enumerate(unpaired) if same_element(item, other)), None)
        if partner is None:
            return False
        del unpaired[partner]
    return not unpaired


def values(relation: Relation) -> list[Any]:
    """Returns the sides of a chain of equations, except the one that names what is asked for."""
    sides, names = relation.sides, relation.names
    if names[0] is not None:
        return list(sides[1:])
    return list(sides[:-1] if names[-1] is not None else sides)


def same_value(expected: Any, relation: Relation) -> bool:
    """Returns whether an equation, membership or inequality gives exactly `expected`."""
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
    """Returns whether an equation gives a name a value without letters."""
    value = relation.sides[1]
    return relation.names[0] is not None and not (isinstance(value, sympy.Expr) and value.free_symbols)


def same_equation(expected: Relation, answer: Relation) -> bool:
    """Returns whether both equations name the same thing and give it the same value."""
    name = expected.names[0]
    if name is None or name not in answer.names:
        return False
    return same_value(expected.sides[-1], answer)


def same_difference(expected: Relation, answer: Relation) -> bool:
    """Returns whether left minus right is the same in both up to a constant factor, positive for `<`."""
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
    """Returns the letter of a membership, or of an inequality of one formula with one letter and numbers; else None."""
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
    """Returns the real numbers that a set, an interval or an inequality describes. Raises Unreadable for others."""
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
        raise Unreadable("not an inequality of one letter")
    result: sympy.Set = sympy.S.Reals
    position = next(index for index, side in enumerate(meaning.sides) if side.free_symbols)
    for index, operator in enumerate(meaning.operators):
        if index not in (position - 1, position):
            raise Unreadable("a chain that compares numbers")
        number = meaning.sides[index] if index == position - 1 else meaning.sides[index + 1]
        if index == position - 1:  # number < letter is letter > number
            operator = TURNED.get(operator, operator)
        result = sympy.Intersection(result, half_line(operator, meaning.sides[position], number, letter))
    return result


def excludes(meaning: Items) -> bool:
    r"""Returns whether a list holds only inequalities, one of them a `\neq`, which all apply: `x < 1, x \neq -2`."""
    every = meaning.kind == "list" and all(map(is_inequality, meaning.items))
    return every and any("!=" in item.operators for item in meaning.items)
