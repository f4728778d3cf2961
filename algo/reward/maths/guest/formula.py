r"""Reads one number, formula or matrix: a recursive descent over its tokens.

Invariants
- Nothing is guessed or taken for a product where a person would see a digit (`3{4}`, `2 3`, `1/2x`): it is Unreadable.
- Numbers are exact. `i` and `e` are the constants, other letters are real variables.
"""

from __future__ import annotations

from typing import Any

import sympy

from algo.reward.maths.guest.meaning import Unreadable
from algo.reward.maths.guest.tokens import GREEK, closing, is_number

ACCENTS = {r"\vec", r"\hat", r"\bar", r"\overline", r"\tilde", r"\widehat", r"\overrightarrow", r"\mathcal", r"\mathbf"}
TRIGONOMETRY = ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")
FUNCTIONS = {rf"\{name}": getattr(sympy, name) for name in TRIGONOMETRY}
INVERSES = {rf"\{name}": getattr(sympy, f"a{name}") for name in TRIGONOMETRY}
FUNCTIONS |= {rf"\arc{name[1:]}": function for name, function in INVERSES.items()}
FUNCTIONS |= {r"\exp": sympy.exp, r"\arg": sympy.arg, r"\Re": sympy.re, r"\Im": sympy.im}
SEVERAL = {r"\gcd": sympy.gcd, r"\lcm": sympy.lcm, r"\max": sympy.Max, r"\min": sympy.Min}
LOGARITHMS = {r"\ln", r"\log", r"\lg"}
APPLIED = {*FUNCTIONS, *LOGARITHMS}  # their argument may stand without parentheses
# Tokens that an atom may begin with, in addition to letters, numbers and |.
STARTS = {"(", "[", "{", r"\frac", r"\sqrt", r"\binom", r"\pi", r"\infty", r"\lfloor", r"\lceil", r"\begin", r"\imath"}
STARTS |= GREEK | ACCENTS | APPLIED | set(SEVERAL)
# Tokens after which a number begins a term.
BEFORE_A_TERM = {"+", "-", "(", "[", "{", ",", "=", "<", ">", "&", r"\\", r"\le", r"\ge"}
PRODUCTS = {r"\cdot", r"\times"}
QUOTIENTS = {"/", r"\div"}
PERCENT = {r"\%", "%"}


class Formula:
    """Reads the tokens of one formula. `position` is that of the next token."""

    def __init__(self, tokens: list[str], logarithm: Any) -> None:
        self.tokens = tokens
        self.position = 0
        self.logarithm = logarithm
        self.bars = 0  # how many | of absolute values are open

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
        r"""Returns `left` times the next factor, or the mixed number `2\frac{1}{2}`."""
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
                    raise Unreadable("a fraction behind a number that makes no mixed number")
                return left / hundred + right
        if before.isdigit() and opening == "{":
            raise Unreadable("a number in braces behind a number")
        return left * right

    def behind_factorial(self) -> bool:
        """Returns whether the next number follows a factorial and cannot be misread: `3!7!`, `n!2^n`."""
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
        """Returns whether the next token begins an atom."""
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
        """Reads an exponent: a group, or the next atom with all of its digits."""
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
        r"""Reads the argument of a command such as \frac: a group, or one digit or letter."""
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
        """Reads the argument of a function: a group, or the product that follows, up to a sign or another function."""
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
        """Skips a group or one token; its text is a name."""
        if self.peek() == "{":
            self.position = closing(self.tokens, self.position) + 1
        else:
            self.take()


def is_number_alone(tokens: list[str], position: int) -> bool:
    """Returns whether the number at `position` begins a term."""
    return position == 0 or tokens[position - 1] in BEFORE_A_TERM


def quotient(above: Any, below: Any) -> Any:
    if below == 0 or isinstance(below, sympy.MatrixBase):
        raise Unreadable("a division by zero or by a matrix")
    return above / below
