"""Compares what a program printed with what is expected. Pure, and linear in both texts.

| rule | right if |
|---|---|
| "exact" | both texts are the same, character by character |
| "lines" | they are, apart from white space at the ends of lines and empty lines at the end |
| "tokens" | they are split into the same words by white space |
| "numbers" | the same, where words that are both numbers may differ by the tolerance |

Under "numbers" a whole number stays exact: two words without a decimal point have to be the same text, and where only
the expected one is whole, the tolerance is absolute. Otherwise 1000000008 would be as good as 1000000007, and so would
an n / 2 that should have been n // 2. Fix for real results that happen to be whole: write them as 1000000.0.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal
from itertools import zip_longest

from algo.reward.code.problem import Rule

LONGEST_NUMBER = 64  # characters; reading a number is slow in its length
ARITHMETIC = Context(prec=2 * LONGEST_NUMBER)  # Whole numbers of that length are subtracted without rounding.


def same(printed: str, expected: str, rule: Rule, tolerance: float) -> bool:
    """Returns whether `printed` is right.

    >>> same("1  2\\n", "1 2", "tokens", 0.0), same("0.3333333\\n", "0.333333", "numbers", 1e-6)
    (True, True)
    """
    if rule == "exact":
        return printed == expected
    if rule == "lines":
        return _lines(printed) == _lines(expected)
    printed_words, expected_words = printed.split(), expected.split()
    if rule == "tokens" or len(printed_words) != len(expected_words):
        return printed_words == expected_words
    return all(_same_word(*pair, tolerance) for pair in zip_longest(printed_words, expected_words, fillvalue=""))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_word(printed: str, expected: str, tolerance: float) -> bool:
    if printed == expected:
        return True
    number, wanted = _number(printed), _number(expected)
    if number is None or wanted is None or (_whole(printed) and _whole(expected)):
        return False
    scale = Decimal(1) if _whole(expected) else max(Decimal(1), abs(number), abs(wanted))
    return abs(ARITHMETIC.subtract(number, wanted)) <= ARITHMETIC.multiply(Decimal(tolerance), scale)


def _whole(word: str) -> bool:
    return word.lstrip("+-").isdigit()


def _number(word: str) -> Decimal | None:
    """Returns a finite number as programs print it; None for other words, such as nan, inf and 1_000."""
    if len(word) > LONGEST_NUMBER or "_" in word or not word.isascii():
        return None
    try:
        return Decimal(word) if math.isfinite(float(word)) else None
    except (ValueError, ArithmeticError):  # Decimal refuses exponents that float rounds to zero.
        return None
