r"""Reads LaTeX as a person does.

Invariants
- A text is read whole: a token that is not known, or that means two things, raises Unreadable.
- Nothing is evaluated as Python except by Math-Verify's parser, which reads what only it knows (MATH_VERIFY), and from
  which `verdict` takes Python's eval away.
"""

from __future__ import annotations

from typing import Any

import math_verify.parser
import sympy

from algo.reward.maths.guest.formula import Formula
from algo.reward.maths.guest.meaning import Items, Relation, Unreadable
from algo.reward.maths.guest.tokens import (
    OPENING,
    TOKEN,
    bracketed_whole,
    closing,
    is_number,
    name_of,
    simple,
    split,
)

BRACKETS = {("(", ")"), ("[", "]"), ("[", ")"), ("(", "]")}
RELATIONS = {"=": "=", "<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", r"\neq": "!=", r"\in": "in"}
ORDERS = {"<", "<=", ">", ">=", "!="}
LISTS = {",": "list", ";": "list", r"\land": "and", r"\lor": "or"}
MATH_VERIFY = {r"\sum", r"\prod", r"\int", r"\lim"}


def understood(text: str, logarithm: Any = 10) -> Any:
    r"""Returns the meaning of a text. logarithm: the base of a bare \log. Raises one of REFUSALS."""
    return Reader(logarithm).answer(TOKEN.findall(text))


class Reader:
    """Reads what stands around formulas: lists, relations, sets, intervals. Each method reads all of its tokens."""

    def __init__(self, logarithm: Any) -> None:
        self.logarithm = logarithm

    def answer(self, tokens: list[str]) -> Any:
        r"""Reads a whole text. A number with its rounding behind it, `\frac{2}{3} \approx 0.667`, means the number."""
        if r"\approx" not in tokens:
            return self.items(tokens)
        at = tokens.index(r"\approx")
        meaning = self.items(tokens[:at])
        value = meaning.sides[-1] if isinstance(meaning, Relation) and meaning.operators[-1] == "=" else meaning
        if not isinstance(value, sympy.Expr) or not value.is_number or not is_rounding(tokens[at + 1 :], value):
            raise Unreadable("about equal to something that is not its rounding")
        return meaning

    def items(self, tokens: list[str]) -> Any:
        """Reads a list, or the only thing that stands there."""
        kinds, parts = split(tokens, LISTS)
        meanings = [meaning for part in parts for meaning in self.signs(part)]
        if len(meanings) == 1:
            return meanings[0]
        return Items("list" if len(set(kinds)) != 1 else LISTS[kinds[0]], tuple(meanings))

    def signs(self, tokens: list[str]) -> list[Any]:
        r"""Returns one meaning, or two where there is a \pm."""
        count = tokens.count(r"\pm") + tokens.count(r"\mp")
        if count == 0 or bracketed_whole(tokens):
            return [self.relation(tokens)]
        if count > 2:
            raise Unreadable("more than two signs")
        upper, lower = {r"\pm": "+", r"\mp": "-"}, {r"\pm": "-", r"\mp": "+"}
        return [self.relation([sign.get(token, token) for token in tokens]) for sign in (upper, lower)]

    def relation(self, tokens: list[str]) -> Any:
        operators, sides = split(tokens, RELATIONS)
        if not operators:
            return self.union(tokens)
        names = tuple(name_of(side) for side in sides)
        ordered = bool({RELATIONS[operator] for operator in operators} & ORDERS)
        meanings = tuple(
            None if name is not None and not simple(side, ordered=ordered) else self.union(side)
            for name, side in zip(names, sides, strict=True)
        )
        return Relation(tuple(RELATIONS[operator] for operator in operators), meanings, names)

    def union(self, tokens: list[str]) -> Any:
        """Reads unions, intersections or differences of sets from left to right, or something without them."""
        operators, parts = split(tokens, {r"\cup": "", r"\cap": "", r"\setminus": ""})
        if not operators:
            return self.bracketed(tokens)
        if len(set(operators)) > 1:
            raise Unreadable("mixed operations of sets")
        result, *others = [real_set(self.bracketed(part)) for part in parts]
        for operator, other in zip(operators, others, strict=True):
            result = {r"\cup": sympy.Union, r"\cap": sympy.Intersection, r"\setminus": sympy.Complement}[operator](
                result, other
            )
        return result

    def bracketed(self, tokens: list[str]) -> Any:
        if tokens == [r"\emptyset"]:
            return sympy.S.EmptySet
        if tokens[:1] == [r"\mathbb"]:
            sets = {"R": sympy.S.Reals, "Z": sympy.S.Integers, "N": sympy.S.Naturals, "Q": sympy.S.Rationals}
            name = "".join(tokens[1:]).strip("{}")
            if name not in sets:
                raise Unreadable(name)
            return sets[name]
        if len(tokens) < 2 or tokens[0] not in OPENING or closing(tokens, 0) != len(tokens) - 1:
            return self.scalar(tokens)
        first, last, inside = tokens[0], tokens[-1], tokens[1:-1]
        if (first, last) == (r"\{", r"\}"):
            bars, parts = split(inside, {r"\mid": "", ":": ""})
            if len(bars) == 1:
                return self.condition(*parts)
            meaning = self.items(inside)
            return Items("set", meaning.items if isinstance(meaning, Items) and meaning.kind == "list" else (meaning,))
        separators, parts = split(inside, LISTS)
        if (first, last) == (r"\langle", r"\rangle") and separators:
            first, last = "(", ")"
        if (first, last) in BRACKETS and separators:
            if set(separators) - {",", ";"}:
                raise Unreadable("words in brackets")
            if r"\pm" in inside or r"\mp" in inside:
                raise Unreadable("two signs in brackets")
            kind = first + last if (first, last) != ("[", "]") or len(parts) == 2 else "list"
            return Items(kind, tuple(self.relation(part) for part in parts))
        if (first, last) in {("(", ")"), ("[", "]"), ("{", "}")} and split(inside, RELATIONS)[0]:
            return self.relation(inside)
        if (first, last) in {("(", ")"), ("[", "]"), ("{", "}")} and bracketed_whole(inside):
            return self.bracketed(inside)
        return self.scalar(tokens)

    def condition(self, element: list[str], condition: list[str]) -> Any:
        r"""Reads a set that a condition describes: `\{x \mid x > 2\}`, `\{x\in\mathbb{R} : x > 2\}`."""
        if element[1:] not in ([], [r"\in", r"\mathbb", "{", "R", "}"]) or not element[0].isalpha():
            raise Unreadable("a set whose element is not a real variable")
        meaning = self.items(condition)
        relations = meaning.items if isinstance(meaning, Items) and meaning.kind in ("and", "or") else (meaning,)
        if any(not isinstance(item, Relation) or not is_about(item, element[0]) for item in relations):
            raise Unreadable("a condition that is not about the element")
        return meaning

    def scalar(self, tokens: list[str]) -> Any:
        """Reads a number, a formula or a matrix."""
        if MATH_VERIFY & set(tokens):
            return exact(math_verify.parser.parse_latex_cached(latex_of(tokens)))
        formula = Formula(tokens, self.logarithm)
        meaning = formula.sum()
        if formula.position != len(tokens):
            raise Unreadable(f"{formula.peek()} at {formula.position}")
        if isinstance(meaning, sympy.Expr) and meaning.has(sympy.nan, sympy.zoo):
            raise Unreadable("undefined")
        return meaning


def latex_of(tokens: list[str]) -> str:
    """Returns the text of tokens for Math-Verify, with braces around a number that is an index or exponent."""
    text = ""
    for position, token in enumerate(tokens):
        before = tokens[position - 1] if position else ""
        if is_number(token) and is_number(before) and tokens[position - 2] not in ("_", "^"):
            raise Unreadable("two numbers beside each other")
        script = is_number(token) and before in ("_", "^")
        # A space before the d of a differential.
        text += " " if token == "d" and position == len(tokens) - 2 else ""
        text += f"{{{token}}}" if script else token
        text += " " if token.startswith("\\") and token[1:].isalpha() else ""
    return text


def is_rounding(tokens: list[str], value: Any) -> bool:
    """Returns whether the tokens are a number to which `value` rounds."""
    digits = tokens[1:] if tokens[:1] == ["-"] else tokens
    if len(digits) != 1 or not is_number(digits[0]):
        return False
    decimals = len(digits[0].partition(".")[2])
    apart = sympy.N(abs(value - sympy.Rational("".join(tokens))), 30)
    return bool(apart <= sympy.Rational(1, 2 * 10**decimals))


def is_about(relation: Relation, letter: str) -> bool:
    symbol = sympy.Symbol(letter, real=True)
    return any(isinstance(side, sympy.Expr) and symbol in side.free_symbols for side in relation.sides)


def real_set(meaning: Any) -> Any:
    """Returns an interval or a set of numbers as a set of sympy. Raises Unreadable for anything else."""
    if isinstance(meaning, sympy.Set):
        return meaning
    if (
        isinstance(meaning, Items)
        and meaning.kind == "set"
        and all(isinstance(item, sympy.Expr) for item in meaning.items)
    ):
        return sympy.FiniteSet(*meaning.items)
    if isinstance(meaning, Items) and len(meaning.items) == 2 and (meaning.kind[0], meaning.kind[-1]) in BRACKETS:
        low, high = meaning.items
        left_open, right_open = meaning.kind[0] == "(", meaning.kind[-1] == ")"
        if (low == -sympy.oo and not left_open) or (high == sympy.oo and not right_open):
            raise Unreadable("an interval that includes its infinite end")
        if not (low < high) == True:  # noqa: E712  sympy's own truth
            raise Unreadable("an interval whose ends are not in order")
        return sympy.Interval(low, high, left_open, right_open)
    raise Unreadable("not a set of numbers")


def exact(meaning: Any) -> Any:
    """Returns a formula with its decimals as fractions, evaluated."""
    if not isinstance(meaning, sympy.Expr):
        raise Unreadable("not a formula")
    return meaning.xreplace({value: sympy.Rational(str(value)) for value in meaning.atoms(sympy.Float)}).doit()
