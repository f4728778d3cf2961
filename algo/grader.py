"""The program that grades one answer with Math-Verify, inside the sandbox: its text is what `algo.grade_math` sends.

Invariants
- It says "ready" after the reference is understood and before the answer is read, then one of "right", "wrong",
  "failed". Each line that it says starts with the mark that the node made for this one call.
- "wrong" is said of an answer that was compared, or that Math-Verify or sympy refused (REFUSALS). Any other exception
  (no memory, a bug of the libraries or of this file) is "failed", which says nothing about the answer.
- A module of its own libraries that cannot be imported ends it at once: both libraries would take that for "not equal".
- Nothing of the answer is evaluated as Python but numbers: Math-Verify only reads LaTeX, and the one place in sympy
  where text becomes code takes numbers only.
- The whole content of the box is the answer: none of Math-Verify's searching for answers within a text is used.

Standard input: a line of JSON [mark, reference], then a line of JSON with the answer.
"""

from __future__ import annotations

import json
import os
import re
import sys
from itertools import product
from types import SimpleNamespace
from typing import Any

import math_verify
import sympy
import sympy.physics.units  # imported by `simplify` at its first use, and itself evaluates text
from latex2sympy2_extended.latex2sympy2 import normalize_latex
from math_verify.parser import LatexExtractionConfig, parse_latex_cached
from sympy import NonSquareMatrixError, ShapeError
from sympy.parsing import sympy_parser

NORMALIZATION = LatexExtractionConfig().normalization_config
# Within tuples and sets decimals are rounded before they are compared; Math-Verify's 6 would take 0.333333 for 1/3.
DECIMALS = 12
LIBRARIES = ("antlr4", "latex2sympy2_extended", "math_verify", "mpmath", "sympy")
# Exactly these types, not their subclasses, say that a text cannot be read or compared. Exception: all that the parser
# itself raises, without a type of its own. ValueError: sympy's constructors ("mismatched dimensions"); so do the two
# of matrices that do not fit. TypeError and NotImplementedError: comparisons that sympy does not define or decide.
# RecursionError: nested too deep for the parser.
REFUSALS = (Exception, ValueError, TypeError, NotImplementedError, RecursionError, ShapeError, NonSquareMatrixError)
NUMBER = re.compile(r"(?:Integer|Float) ?\('?[0-9.eE+-]+'? ?\)")

evaluate = sympy_parser.eval_expr


def evaluate_number(code: Any, *spaces: Any) -> Any:
    """In place of sympy's eval of text, which Math-Verify reaches with the digits of a number."""
    if not isinstance(code, str) or not NUMBER.fullmatch(code):
        raise ValueError(f"not a number: {code!r}")
    return evaluate(code, *spaces)


def read(latex: str) -> list[Any]:
    """As `math_verify.parse` reads the content of a box: what it means, if it can be parsed, and its text."""
    text = normalize_latex(latex.strip().removesuffix("."), config=NORMALIZATION)
    try:
        meaning = parse_latex_cached(text)
        if isinstance(meaning, sympy.Expr):  # exact: only so is 0.333333 not 1/3, and 0.1 + 0.2 is 0.3
            meaning = meaning.xreplace({value: sympy.Rational(str(value)) for value in meaning.atoms(sympy.Float)})
        if isinstance(meaning, sympy.Mul) and "%" in text:
            meaning = meaning.doit()  # its value: for Math-Verify 5 % is 0.05 and also 5
    except Exception as error:
        if type(error) not in REFUSALS:
            raise
        return [text]
    return [meaning, text]


def equal(expected: Any, answer: Any) -> bool:
    """As `math_verify.verify` compares two meanings or two texts; False for what it refuses to compare."""
    try:
        return bool(
            math_verify.verify(expected, answer, float_rounding=DECIMALS, timeout_seconds=None, raise_on_error=True)
        )
    except Exception as error:
        if type(error) not in REFUSALS:
            raise
        return False


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
        right = any(equal(*pair) for pair in product(expected, answer))
    except BaseException as error:  # SystemExit too
        print(mark, "failed", *f"{type(error).__name__}: {error}"[:200].split(), flush=True)
        os._exit(1)
    print(mark, "right" if right else "wrong")


if __name__ == "__main__":
    main()
