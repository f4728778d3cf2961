r"""Compares the content of a box with a reference, as far as their texts tell.

Invariants
- True and False are final. A Question is left to the grader: LaTeX of both, in one unit.
- Units count if the reference has one: then the answer must have the same, one of the same kind (5 km, 5000 m) or none.
  If the reference has none, the answer's unit is dropped, unless it is a letter such as x or K.
- A reference in another base (`52_8`) needs its digits and its base; a number without a base has base ten.
- Case counts in formulas (R is not r) but not in words, nor in the letter of a choice where the reference shows that it
  is one: `\text{(C)}`, `(C)`, `\text{C}`. If the reference is one letter from A to J and the answer shows an option
  (`(E) 42`, `E: rising costs`), their letters are compared. Adjacent letters from A to J are no product: they are an
  order (`BDAC`) or several options (`ABD`, which may also be written `A, B, D`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from algo.reward.maths.number import Number
from algo.reward.maths.reading import SPOKEN_SETS, Reading, is_list, read, without_percent
from algo.reward.maths.unit import may_be_no_unit

LARGEST_EXPONENT = 9999  # largest power of ten that the grader computes; beyond it only the text is compared
RADIANS = r"\frac{\pi}{180}"
# Words that mean the empty set.
NO_SOLUTION = frozenset(
    ("no solution", "no solutions", "there is no solution", "there are no solutions", "empty set", "none")
)
SPELLED_OUT = {"dne": "does not exist"}
OPTION = re.compile("[A-J]")
OPTIONS = re.compile(r"[A-J]{2,}")
BETWEEN_OPTIONS = re.compile(r"\\land|and|[\s,;]")
ANGLE, RADIAN = (("angle", 1),), (("radian", 1),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Asks the grader whether two formulas are equal, both in LaTeX."""

    answer: str
    reference: str


def compare(answer: str, reference: str, *, ignoring_percent: bool = False) -> bool | Question:
    r"""Returns whether answer and reference agree. ignoring_percent: without a unit, percent signs are dropped first.

    >>> compare("1, 100", "1100"), compare(r"5\text{ kg}", r"5\text{ m}"), compare("3 million", "3e6")
    (False, False, True)
    """
    expected, given = read(reference), read(answer, beside_list=is_list(reference))
    if ignoring_percent and given.unit is None and expected.unit is None:
        expected, given = without_percent(expected), without_percent(given)
    if given.text == "":
        return False
    if expected.option is not None and given.option is not None and expected.option != given.option:
        return False
    if expected.option is not None and expected.words is not None:
        return (given.option or given.text.strip("()").upper()) == expected.option
    if given.text in (expected.text, expected.option):
        return True
    expected_options, answered_options = options(expected.text), options(given.text)
    if expected_options and answered_options:
        ordered = OPTIONS.fullmatch(expected.text) is not None
        return answered_options == expected_options if ordered else sorted(answered_options) == sorted(expected_options)
    if given.option is not None and OPTION.fullmatch(expected.text):
        return given.option == expected.text
    if expected.number is None and (expected.words is not None or given.words is not None):
        if not (is_set(given) and is_set(expected)):
            return same_words(given, expected)
        if given.words is not None and expected.words is not None:
            return given.value == expected.value
    if expected.value is None or given.value is None:
        return False
    if expected.base not in (None, 10):
        return given.base == expected.base and same_number(given, expected)
    return compare_quantities(given, expected)


def same_words(given: Reading, expected: Reading) -> bool:
    if given.words is not None and expected.words is not None and spelled(given.words) == spelled(expected.words):
        return True
    return is_nothing(given) and is_nothing(expected)


def spelled(words: str) -> list[str]:
    """Returns the words without "and", which a comma may replace."""
    return [word for word in SPELLED_OUT.get(words, words).split() if word != "and"]


def options(text: str) -> str:
    """Returns the letters of several options, `ABD` or `(A), (B)`; none for other texts."""
    letters = BETWEEN_OPTIONS.sub("", re.sub(r"\(([A-J])\)", r"\1", text))
    return letters if OPTIONS.fullmatch(letters) and len(set(letters)) == len(letters) else ""


def is_set(reading: Reading) -> bool:
    """Returns whether a reading may be a set of numbers: it has no words, or those for such a set."""
    return reading.words is None or reading.value in SPOKEN_SETS.values()


def is_nothing(reading: Reading) -> bool:
    return reading.words in NO_SOLUTION or reading.value == r"\emptyset"


def same_number(given: Reading, expected: Reading) -> bool:
    return given.number is not None and expected.number is not None and given.number.equals(expected.number)


def compare_quantities(given: Reading, expected: Reading) -> bool | Question:
    if (given.several and expected.number) or (given.number and expected.several):
        return False
    if given.unit is not None and expected.unit is None and may_be_no_unit(given.unit):
        return False
    factor = Fraction(1)
    if given.unit is not None and expected.unit is not None:
        if given.unit.kinds == expected.unit.kinds:
            factor = given.unit.size / expected.unit.size
        elif {given.unit.kinds, expected.unit.kinds} != {ANGLE, RADIAN}:
            return False
    answer_factor, expected_factor = radians(given, expected), radians(expected, given)
    if given.number is not None and expected.number is not None and not (answer_factor or expected_factor):
        return same_quantity(given.number, expected.number, factor)
    if any(
        number is not None and abs(number.exponent) > LARGEST_EXPONENT for number in (given.number, expected.number)
    ):
        return False
    if factor != 1:
        answer_factor = rf"\frac{{{factor.numerator}}}{{{factor.denominator}}}"
    return Question(answer=latex(given, answer_factor), reference=latex(expected, expected_factor))


def radians(reading: Reading, other: Reading) -> str:
    r"""Returns the factor that turns degrees into radians, if the other side has these, or has a \pi and no unit."""
    if reading.unit is None or reading.unit.kinds != ANGLE:
        return ""
    if other.unit is None:
        return RADIANS if other.value is not None and r"\pi" in other.value else ""
    return RADIANS if other.unit.kinds == RADIAN else ""


def same_quantity(given: Number, expected: Number, factor: Fraction) -> bool:
    if factor == 1:
        return given.equals(expected)
    if max(abs(given.exponent), abs(expected.exponent), len(given.digits), len(expected.digits)) > 400:
        return False
    return fraction(given) * factor == fraction(expected)


def fraction(number: Number) -> Fraction:
    return (-1 if number.negative else 1) * int(number.digits) * Fraction(10) ** number.exponent


def latex(reading: Reading, factor: str) -> str:
    assert reading.value is not None
    number = reading.number
    if number is None:
        text = reading.value
    else:
        power = rf"\cdot 10^{{{number.exponent}}}" if number.exponent else ""
        text = ("-" if number.negative else "") + number.digits + power
    return rf"({text})\cdot {factor}" if factor else text
