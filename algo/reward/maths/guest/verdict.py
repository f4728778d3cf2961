"""How a program in the sandbox grades one answer and reports its verdict to `algo.reward.maths.grader`.

Invariants
- It prints "ready" after it has read the reference and before it reads the answer, then one of "right", "wrong" and
  "failed". Each line starts with the mark that the node made for this one call.
- "failed" tells nothing about the answer: it stands for exceptions that the judge does not take for a refusal, such as
  a lack of memory or a bug.
- A module of the libraries that cannot be imported ends the program at once; the libraries would go on and call the
  answer "not equal".
- In the one place where sympy turns text into code, only text that the judge allows is evaluated: numbers.

Standard input: a line of JSON [mark, reference], then a line of JSON with the answer.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import sympy.physics.units  # noqa: F401  `simplify` imports it at its first use, and it evaluates text itself
from sympy.parsing import sympy_parser

LIBRARIES = ("antlr4", "latex2sympy2_extended", "math_verify", "mpmath", "sympy")
NUMBER = r"(?:Integer|Float) ?\('?[0-9.eE+-]+'? ?\)"
evaluate = sympy_parser.eval_expr

Meaning = TypeVar("Meaning")


def evaluator(allowed: str) -> Callable[..., Any]:
    """Returns a replacement for sympy's eval of text. It raises ValueError for all that does not match `allowed`."""

    def evaluate_allowed(code: Any, *spaces: Any) -> Any:
        if not isinstance(code, str) or not re.fullmatch(allowed, code):
            raise ValueError(f"not a number: {code!r}")
        return evaluate(code, *spaces)

    return evaluate_allowed


def grade(read: Callable[[str], Meaning], same: Callable[[Meaning, Meaning], bool], *, allowed: str = NUMBER) -> None:
    """Grades the answer on standard input.

    same: whether the meanings of reference and answer agree. allowed: the pattern of code that sympy may evaluate.
    """
    mark, reference = json.loads(sys.stdin.readline())

    def lacking(name: str, *_: Any) -> None:
        """Ends the program for a module that no other finder knows."""
        if name.startswith(tuple(f"{library}." for library in LIBRARIES)):
            print(mark, "lacks", name, flush=True)
            os._exit(1)

    sys.meta_path.append(SimpleNamespace(find_spec=lacking))
    sympy_parser.eval_expr = evaluator(allowed)
    expected = read(reference)
    print(mark, "ready", flush=True)
    try:
        right = same(expected, read(json.loads(sys.stdin.readline())))
    except BaseException as error:  # SystemExit too
        print(mark, "failed", *f"{type(error).__name__}: {error}"[:200].split(), flush=True)
        os._exit(1)
    print(mark, "right" if right else "wrong")
