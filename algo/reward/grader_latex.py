r"""Reads LaTeX as a person does, inside the sandbox: its text is the first part of the program of
`algo.reward.grade_math`.

Invariants
- What it reads it reads whole: a token that it does not know, or that means two things, raises Unreadable. Nothing is
  skipped, guessed or taken for a product where a person would see a digit (`3{4}`, `2 3`, `1/2x`).
- Numbers are exact. `i` and `e` are the constants, other letters are real variables.
- Nothing is evaluated as Python but by Math-Verify's parser, which reads what only it knows (MATH_VERIFY), and for
  which `algo.reward.grader_program` takes Python's eval away.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import math_verify.parser
import sympy

TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d*)?|\.\d+|\S", re.DOTALL)
OPENING = {"(", "[", "{", r"\{", r"\lfloor", r"\lceil", r"\langle", r"\begin"}
CLOSING = {")", "]", "}", r"\}", r"\rfloor", r"\rceil", r"\rangle", r"\end"}
BRACKETS = {("(", ")"), ("[", "]"), ("[", ")"), ("(", "]")}
RELATIONS = {"=": "=", "<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", r"\neq": "!=", r"\in": "in"}
ORDERS = {"<", "<=", ">", ">=", "!="}
UNKNOWN_RELATIONS = {r"\approx", r"\sim", r"\simeq", r"\cong", r"\notin", r"\to", r"\Rightarrow", r"\implies"}
LISTS = {",": "list", ";": "list", r"\land": "and", r"\lor": "or"}
MATH_VERIFY = {r"\sum", r"\prod", r"\int", r"\lim"}
LETTERS = """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau
upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell"""
GREEK = frozenset(rf"\{name}" for name in LETTERS.split())
ACCENTS = {r"\vec", r"\hat", r"\bar", r"\overline", r"\tilde", r"\widehat", r"\overrightarrow", r"\mathcal", r"\mathbf"}
TRIGONOMETRY = ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")
FUNCTIONS = {rf"\{name}": getattr(sympy, name) for name in TRIGONOMETRY}
INVERSES = {rf"\{name}": getattr(sympy, f"a{name}") for name in TRIGONOMETRY}
FUNCTIONS |= {rf"\arc{name[1:]}": function for name, function in INVERSES.items()}
FUNCTIONS |= {r"\exp": sympy.exp, r"\arg": sympy.arg, r"\Re": sympy.re, r"\Im": sympy.im}
SEVERAL = {r"\gcd": sympy.gcd, r"\lcm": sympy.lcm, r"\max": sympy.Max, r"\min": sympy.Min}
LOGARITHMS = {r"\ln", r"\log", r"\lg"}
APPLIED = {*FUNCTIONS, *LOGARITHMS}  # to an argument that may stand without parentheses
# What an atom may begin with, beside letters, numbers and |.
STARTS = {"(", "[", "{", r"\frac", r"\sqrt", r"\binom", r"\pi", r"\infty", r"\lfloor", r"\lceil", r"\begin", r"\imath"}
STARTS |= GREEK | ACCENTS | APPLIED | set(SEVERAL)
# Before a number that begins a term.
BEFORE_A_TERM = {"+", "-", "(", "[", "{", ",", "=", "<", ">", "&", r"\\", r"\le", r"\ge"}
PRODUCTS = {r"\cdot", r"\times"}
QUOTIENTS = {"/", r"\div"}
PERCENT = {r"\%", "%"}


class Unreadable(ValueError):
    """The text is no mathematics that has one meaning."""


@dataclass(frozen=True)
class Items:
    """Several things: kind is "list" (bare), "and", "or", "set", or the two brackets of a tuple or an interval."""

    kind: str
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Relation:
    """A chain `sides[0] operators[0] sides[1] ...`; names[i] is the text of a side that only names something."""

    operators: tuple[str, ...]
    sides: tuple[Any, ...]
    names: tuple[str | None, ...]


def understood(text: str, logarithm: Any = 10) -> Any:
    r"""What a text means: a sympy expression, matrix or set, or Items or a Relation of such.

    logarithm: the base of a bare \log.
    """
    return Reader(logarithm).answer(TOKEN.findall(text))


class Reader:
    def __init__(self, logarithm: Any) -> None:
        self.logarithm = logarithm

    def answer(self, tokens: list[str]) -> Any:
        r"""The whole text. Of a number with its rounding, `\frac{2}{3} \approx 0.667`, it is the number."""
        if r"\approx" not in tokens:
            return self.items(tokens)
        at = tokens.index(r"\approx")
        meaning = self.items(tokens[:at])
        value = meaning.sides[-1] if isinstance(meaning, Relation) and meaning.operators[-1] == "=" else meaning
        if not isinstance(value, sympy.Expr) or not value.is_number or not is_rounding(tokens[at + 1 :], value):
            raise Unreadable("about equal to what is not its rounding")
        return meaning

    def items(self, tokens: list[str]) -> Any:
        """A list, or what stands in it alone."""
        kinds, parts = split(tokens, LISTS)
        found = [meaning for part in parts for meaning in self.signs(part)]
        if len(found) == 1:
            return found[0]
        return Items("list" if len(set(kinds)) != 1 else LISTS[kinds[0]], tuple(found))

    def signs(self, tokens: list[str]) -> list[Any]:
        r"""One meaning, or two with \pm."""
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
        """Unions, intersections and differences of sets from left to right, or something else."""
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
        r"""A set by what its elements fulfil: `\{x \mid x > 2\}`, `\{x\in\mathbb{R} : x > 2\}`."""
        if element[1:] not in ([], [r"\in", r"\mathbb", "{", "R", "}"]) or not element[0].isalpha():
            raise Unreadable("a set of something else")
        meaning = self.items(condition)
        relations = meaning.items if isinstance(meaning, Items) and meaning.kind in ("and", "or") else (meaning,)
        if any(not isinstance(item, Relation) or not is_about(item, element[0]) for item in relations):
            raise Unreadable("a condition of something else")
        return meaning

    def scalar(self, tokens: list[str]) -> Any:
        """A number, a formula or a matrix."""
        if MATH_VERIFY & set(tokens):
            return exact(math_verify.parser.parse_latex_cached(latex_of(tokens)))
        formula = Formula(tokens, self.logarithm)
        meaning = formula.sum()
        if formula.position != len(tokens):
            raise Unreadable(f"{formula.peek()} at {formula.position}")
        if isinstance(meaning, sympy.Expr) and meaning.has(sympy.nan, sympy.zoo):
            raise Unreadable("undefined")
        return meaning


class Formula:
    """A recursive descent over the tokens of one formula. `position` is the next one."""

    def __init__(self, tokens: list[str], logarithm: Any) -> None:
        self.tokens = tokens
        self.position = 0
        self.logarithm = logarithm
        self.bars = 0  # open | of absolute values

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        if token == "":
            raise Unreadable("the text ends early")
        self.position += 1
        return token

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise Unreadable(f"no {token}")

    def sum(self) -> Any:
        total = self.product()
        while self.peek() in ("+", "-"):
            sign = self.take()
            term = self.product()
            total = total + term if sign == "+" else total - term
        if self.peek() == r"\bmod":
            self.take()
            total = sympy.Mod(total, self.product())
        return total

    def product(self) -> Any:
        if self.peek() in ("+", "-"):
            sign = self.take()
            if self.peek() in ("+", "-"):
                raise Unreadable("two signs")
            value = self.product()
            return value if sign == "+" else -value
        result = self.power()
        divided = False
        while True:
            token = self.peek()
            if token in PRODUCTS:
                self.take()
                result = result * self.signed()
                divided = False
            elif token in QUOTIENTS:
                self.take()
                result = quotient(result, self.signed())
                divided = True
            elif self.starts():
                if divided:
                    raise Unreadable("a product without a sign after a quotient")
                if is_number(token) and result != sympy.S.One and not self.behind_factorial():
                    raise Unreadable("a number behind something")
                result = self.beside(result)
            else:
                return result

    def beside(self, left: Any) -> Any:
        r"""A product without a sign, or a mixed number `2\frac{1}{2}`."""
        before = self.tokens[self.position - 1]
        start = self.position
        opening = self.peek()
        if is_number(opening) and not self.behind_factorial():
            raise Unreadable("two numbers beside each other")
        right = self.power()
        if before.isdigit() and opening == r"\frac":
            part = self.tokens[start + 1 : self.position]
            hundred = 100 if part[-1] in PERCENT else 1
            digits = [token for token in (part[:-1] if hundred > 1 else part) if token not in "{}"]
            if all(token.isdigit() for token in digits):
                if not 0 < right * hundred < 1 or not is_number_alone(self.tokens, start - 1):
                    raise Unreadable("a mixed number that is none")
                return left / hundred + right
        if before.isdigit() and opening == "{":
            raise Unreadable("a number in braces behind a number")
        return left * right

    def behind_factorial(self) -> bool:
        """Whether a number is behind a factorial, and cannot be misread: `3!7!`, `n!2^n`."""
        before, behind = (
            self.tokens[max(0, self.position - 2) : self.position],
            self.tokens[self.position + 1 : self.position + 2],
        )
        return before[-1:] == ["!"] and (behind == ["!"] or not is_number(before[0]))

    def signed(self) -> Any:
        if self.peek() in ("+", "-"):
            sign = self.take()
            value = self.power()
            return value if sign == "+" else -value
        return self.power()

    def starts(self) -> bool:
        """Whether the next token begins an atom."""
        token = self.peek()
        if token == "|":
            return self.bars == 0
        return token.isalpha() or is_number(token) or token in STARTS

    def power(self) -> Any:
        base = self.atom()
        while True:
            token = self.peek()
            if token == "^":
                self.take()
                if self.peek() == r"\circ":
                    self.take()
                    base = base * sympy.pi / 180
                    continue
                if self.peek() == r"\prime":
                    raise Unreadable("a derivative")
                base = base ** self.script()
                if self.peek() == "^":
                    raise Unreadable("two exponents")
            elif token == "!":
                self.take()
                if self.peek() == "!":
                    raise Unreadable("a double factorial")
                base = sympy.factorial(base)
            elif token in PERCENT:
                self.take()
                base = base / 100
            else:
                return base

    def script(self) -> Any:
        """An exponent: in braces or parentheses, or the next atom, all digits of it."""
        if self.peek() in ("+", "-"):
            sign = self.take()
            value = self.atom()
            return value if sign == "+" else -value
        return self.atom()

    def group(self, opening: str, closing_: str) -> Any:
        self.expect(opening)
        bars, self.bars = self.bars, 0
        value = self.sum()
        self.bars = bars
        self.expect(closing_)
        return value

    def argument(self) -> Any:
        r"""What a command such as \frac takes: a group, or one digit or letter."""
        token = self.peek()
        if token == "{":
            return self.group("{", "}")
        if is_number(token):
            if not token.isdigit():
                raise Unreadable("a decimal without braces")
            self.tokens[self.position : self.position + 1] = [token[0], token[1:]] if token[1:] else [token]
            return sympy.Integer(self.take())
        return self.atom()

    def atom(self) -> Any:
        token = self.take()
        if is_number(token):
            if self.peek() == "_":
                raise Unreadable("a base within a formula")
            return sympy.Rational(token)
        if token in ("(", "[", "{"):
            self.position -= 1
            return self.group(token, {"(": ")", "[": "]", "{": "}"}[token])
        if token == "|":
            self.bars += 1
            value = self.sum()
            self.expect("|")
            self.bars -= 1
            return sympy.Abs(value) if not isinstance(value, sympy.MatrixBase) else value.det()
        if token == r"\frac":
            above = self.argument()
            below = self.argument()
            if is_number(self.peek()) and self.tokens[self.position - 1].isdigit():
                raise Unreadable("digits behind a fraction")
            return quotient(above, below)
        if token == r"\binom":
            above = self.argument()
            return sympy.binomial(above, self.argument())
        if token == r"\sqrt":
            return self.root()
        if token in (r"\lfloor", r"\lceil"):
            value = self.sum()
            self.expect(r"\rfloor" if token == r"\lfloor" else r"\rceil")
            return sympy.floor(value) if token == r"\lfloor" else sympy.ceiling(value)
        if token == r"\begin":
            return self.matrix()
        if token in LOGARITHMS:
            return self.log(token)
        if token in FUNCTIONS:
            return self.function(token)
        if token in SEVERAL:
            return self.several(token)
        return self.symbol(token)

    def root(self) -> Any:
        degree = sympy.Integer(2)
        if self.peek() == "[":
            degree = self.group("[", "]")
        if is_number(self.peek()) and len(self.peek()) > 1 and self.tokens[self.position - 1] == r"\sqrt":
            value = sympy.Rational(self.take())  # as \sqrt(23): nobody writes it for \sqrt{2}3
        elif self.peek() == "(":
            value = self.group("(", ")")
        else:
            value = self.argument()
        if degree.is_integer and degree.is_odd and value.is_negative:
            return -((-value) ** (1 / degree))
        return value ** (1 / degree)

    def function(self, token: str) -> Any:
        exponent = None
        if self.peek() == "^":
            self.take()
            exponent = self.script()
        function = FUNCTIONS[token]
        if exponent == -1:
            if token not in INVERSES:
                raise Unreadable("an inverse")
            function, exponent = INVERSES[token], None
        value = function(self.operand())
        return value if exponent is None else value**exponent

    def log(self, token: str) -> Any:
        base = sympy.E if token == r"\ln" else sympy.Integer(10) if token == r"\lg" else self.logarithm
        if self.peek() == "_":
            self.take()
            base = self.argument()
        exponent = None
        if self.peek() == "^":
            self.take()
            exponent = self.script()
        value = sympy.log(self.operand(), base)
        return value if exponent is None else value**exponent

    def operand(self) -> Any:
        """Of a function: a group, or the product of what follows up to a sign or another function."""
        if self.peek() in ("(", "[", "{", "|"):
            return self.power_of_group()
        if self.peek() == "-":
            raise Unreadable("a sign behind a function")
        value = self.power()
        while self.starts() and self.peek() not in APPLIED | {"(", "["} and not is_number(self.peek()):
            value = self.beside(value)
        if self.peek() == "/" and value.is_number:  # \cos \pi/3
            self.take()
            value = quotient(value, self.power())
        return value

    def power_of_group(self) -> Any:
        value = self.atom()
        if self.peek() == "^":
            raise Unreadable("an exponent behind the argument of a function")
        return value

    def several(self, token: str) -> Any:
        closing_ = {"(": ")", r"\{": r"\}"}.get(self.take())
        if closing_ is None:
            raise Unreadable(f"no bracket behind {token}")
        values = [self.sum()]
        while self.peek() == ",":
            self.take()
            values.append(self.sum())
        self.expect(closing_)
        result = values[0]
        for value in values[1:]:
            result = SEVERAL[token](result, value)
        return result

    def matrix(self) -> Any:
        name = self.environment()
        if name not in ("pmatrix", "bmatrix", "vmatrix", "matrix"):
            raise Unreadable(name)
        rows = [[self.sum()]]
        while self.peek() in ("&", r"\\"):
            if self.take() == "&":
                rows[-1].append(self.sum())
            elif self.peek() != r"\end":
                rows.append([self.sum()])
        self.expect(r"\end")
        if self.environment() != name or len({len(row) for row in rows}) != 1:
            raise Unreadable("rows of different lengths")
        matrix = sympy.ImmutableMatrix(rows)
        return matrix.det() if name == "vmatrix" else matrix

    def environment(self) -> str:
        self.expect("{")
        name = ""
        while self.peek() != "}":
            name += self.take()
        self.expect("}")
        return name

    def symbol(self, token: str) -> Any:
        if token == r"\pi":
            return sympy.pi
        if token == r"\infty":
            return sympy.oo
        if token == r"\imath" or (token == "i" and self.peek() != "_"):
            return sympy.I
        if token == "e" and self.peek() != "_":
            return sympy.E
        if token in ACCENTS:
            start = self.position
            self.raw()
            token += "".join(self.tokens[start : self.position]).strip("{}")
        elif not (token in GREEK or (token.isalpha() and token.isascii())):
            raise Unreadable(token)
        if self.peek() == "_":
            self.take()
            start = self.position
            self.raw()
            token += "_" + "".join(self.tokens[start : self.position]).strip("{}")
        if self.peek() == "'":
            raise Unreadable("a derivative")
        return sympy.Symbol(token, real=True)

    def raw(self) -> None:
        """Skips a group or one token, whose text is a name."""
        if self.peek() == "{":
            self.position = closing(self.tokens, self.position) + 1
        else:
            self.take()


def latex_of(tokens: list[str]) -> str:
    """Their text for Math-Verify: a number as index or exponent in braces, a space before a differential."""
    text = ""
    for position, token in enumerate(tokens):
        before = tokens[position - 1] if position else ""
        if is_number(token) and is_number(before) and tokens[position - 2] not in ("_", "^"):
            raise Unreadable("two numbers beside each other")
        script = is_number(token) and before in ("_", "^")
        text += " " if token == "d" and position == len(tokens) - 2 else ""
        text += f"{{{token}}}" if script else token
        text += " " if token.startswith("\\") and token[1:].isalpha() else ""
    return text


def is_number(token: str) -> bool:
    return token[:1].isdigit() or (token[:1] == "." and token[1:2].isdigit())


def is_rounding(tokens: list[str], value: Any) -> bool:
    """Whether the tokens are a number that `value` rounds to."""
    digits = tokens[1:] if tokens[:1] == ["-"] else tokens
    if len(digits) != 1 or not is_number(digits[0]):
        return False
    decimals = len(digits[0].partition(".")[2])
    apart = sympy.N(abs(value - sympy.Rational("".join(tokens))), 30)
    return bool(apart <= sympy.Rational(1, 2 * 10**decimals))


def is_number_alone(tokens: list[str], position: int) -> bool:
    """Whether the number at `position` begins a term."""
    return position == 0 or tokens[position - 1] in BEFORE_A_TERM


def quotient(above: Any, below: Any) -> Any:
    if below == 0 or isinstance(below, sympy.MatrixBase):
        raise Unreadable("divided by nothing")
    return above / below


def closing(tokens: list[str], start: int) -> int:
    """Where the bracket closes that opens at `start`."""
    depth = 0
    for position in range(start, len(tokens)):
        depth += (tokens[position] in OPENING) - (tokens[position] in CLOSING)
        if depth == 0:
            return position
    raise Unreadable("a bracket that nothing closes")


def bracketed_whole(tokens: list[str]) -> bool:
    return len(tokens) > 1 and tokens[0] in OPENING and closing(tokens, 0) == len(tokens) - 1


def split(tokens: list[str], separators: dict[str, str]) -> tuple[list[str], list[list[str]]]:
    """The separators outside of all brackets, and what they part."""
    if UNKNOWN_RELATIONS & set(tokens):
        raise Unreadable("a relation that is none of equality and order")
    found: list[str] = []
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in OPENING) - (token in CLOSING)
        if depth == 0 and token in separators:
            found.append(token)
            parts.append([])
        else:
            parts[-1].append(token)
    if depth != 0 or not all(parts):
        raise Unreadable("a bracket without its other, or nothing between separators")
    return found, parts


NAME = re.compile(r"(?:\\[A-Za-z]+|[A-Za-z]|_\{?\w+\}?|\([-\d.A-Za-z,|_]*\)|[-+/|'{}(),])+")


def name_of(tokens: list[str]) -> str | None:
    """The text of a side of an equation that names what is asked for: `x`, `f(2)`, `a+b`, `(x,y)`; no numbers in it."""
    letters = [token for token in tokens if token in GREEK or (token.isalpha() and token not in ("e", "i"))]
    text = "".join(tokens)
    return text if letters and NAME.fullmatch(text) else None


def simple(tokens: list[str], *, ordered: bool) -> bool:
    """Whether a name is also a formula of its letters. ordered: beside < or >, where |x| is no name but a value."""
    others = {"'", r"\angle", r"\triangle", ","} | (set() if ordered else {"|"})
    return not any(token in others or is_number(token) for token in tokens)


def is_about(relation: Relation, letter: str) -> bool:
    symbol = sympy.Symbol(letter, real=True)
    return any(isinstance(side, sympy.Expr) and symbol in side.free_symbols for side in relation.sides)


def real_set(meaning: Any) -> Any:
    """An interval, a set of numbers or a set as sympy has it."""
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
            raise Unreadable("an interval that has its infinite end")
        if not (low < high) == True:  # noqa: E712  sympy's own truth
            raise Unreadable("no interval")
        return sympy.Interval(low, high, left_open, right_open)
    raise Unreadable("no set of numbers")


def exact(meaning: Any) -> Any:
    """With its decimals as fractions, and evaluated."""
    if not isinstance(meaning, sympy.Expr):
        raise Unreadable("no formula")
    return meaning.xreplace({value: sympy.Rational(str(value)) for value in meaning.atoms(sympy.Float)}).doit()
