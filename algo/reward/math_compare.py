r"""Compares the content of a box with a reference, as far as their texts tell.

Invariants
- True and False are final. A Question is what mathematics has to decide: LaTeX of both, in one unit, for the grader.
- Units count where the reference has one: the answer has the same, one of the same kind (5 km, 5000 m) or none. Where
  the reference has none, the unit of an answer is left out, if it is not a letter such as x or K.
- A reference in another base (`52_8`) wants its digits and its base; a number without a base has base ten.
- Case counts in formulas (R is not r), not in words; nor for the letter of a choice, where the reference shows that it
  is one: `\text{(C)}`, `(C)`, `\text{C}`. Where the reference is one letter from A to J and the answer shows an option
  (`(E) 42`, `E: rising costs`), letters are compared. Letters from A to J beside each other (`BDAC`) are an order, or
  several options (`ABD`, which `A, B, D` may say too), and no product.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from algo.reward.math_text import SPOKEN_SETS, Number, Reading, is_list, read, without_percent
from algo.reward.math_unit import may_be_no_unit

LARGEST_EXPONENT = 9999  # of ten, in the grader; text alone tells larger ones apart
RADIANS = r"\frac{\pi}{180}"
# Words for the empty set.
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
    """Whether two formulas are equal."""

    answer: str
    reference: str


def compare(answer: str, reference: str, *, ignoring_percent: bool = False) -> bool | Question:
    r"""Whether they agree. ignoring_percent: as if neither had a percent sign, if neither has a unit.

    >>> compare("1, 100", "1100"), compare(r"5\text{ kg}", r"5\text{ m}"), compare("3 million", "3e6")
    (False, False, True)
    """
    expected, said = read(reference), read(answer, beside_list=is_list(reference))
    if ignoring_percent and said.unit is None and expected.unit is None:
        expected, said = without_percent(expected), without_percent(said)
    if said.text == "":
        return False
    if expected.option is not None and said.option is not None and expected.option != said.option:
        return False
    if expected.option is not None and expected.words is not None:
        return (said.option or said.text.strip("()").upper()) == expected.option
    if said.text in (expected.text, expected.option):
        return True
    listed, said_listed = options(expected.text), options(said.text)
    if listed and said_listed:
        ordered = OPTIONS.fullmatch(expected.text) is not None
        return said_listed == listed if ordered else sorted(said_listed) == sorted(listed)
    if said.option is not None and OPTION.fullmatch(expected.text):
        return said.option == expected.text
    if expected.number is None and (expected.words is not None or said.words is not None):
        if not (is_set(said) and is_set(expected)):
            return same_words(said, expected)
        if said.words is not None and expected.words is not None:
            return said.value == expected.value
    if expected.value is None or said.value is None:
        return False
    if expected.base not in (None, 10):
        return said.base == expected.base and same_number(said, expected)
    return compare_quantities(said, expected)


def same_words(said: Reading, expected: Reading) -> bool:
    if said.words is not None and expected.words is not None and spelled(said.words) == spelled(expected.words):
        return True
    return is_nothing(said) and is_nothing(expected)


def spelled(words: str) -> list[str]:
    """Words without "and", for which a comma may stand."""
    return [word for word in SPELLED_OUT.get(words, words).split() if word != "and"]


def options(text: str) -> str:
    """The letters of several options, `ABD` or `(A), (B)`; of other texts none."""
    letters = BETWEEN_OPTIONS.sub("", re.sub(r"\(([A-J])\)", r"\1", text))
    return letters if OPTIONS.fullmatch(letters) and len(set(letters)) == len(letters) else ""


def is_set(reading: Reading) -> bool:
    """Whether it may be a set of numbers: no words but those for one."""
    return reading.words is None or reading.value in SPOKEN_SETS.values()


def is_nothing(reading: Reading) -> bool:
    return reading.words in NO_SOLUTION or reading.value == r"\emptyset"


def same_number(said: Reading, expected: Reading) -> bool:
    return said.number is not None and expected.number is not None and said.number.equals(expected.number)


def compare_quantities(said: Reading, expected: Reading) -> bool | Question:
    if (said.several and expected.number) or (said.number and expected.several):
        return False
    if said.unit is not None and expected.unit is None and may_be_no_unit(said.unit):
        return False
    factor = Fraction(1)
    if said.unit is not None and expected.unit is not None:
        if said.unit.kinds == expected.unit.kinds:
            factor = said.unit.size / expected.unit.size
        elif {said.unit.kinds, expected.unit.kinds} != {ANGLE, RADIAN}:
            return False
    answer_factor, expected_factor = radians(said, expected), radians(expected, said)
    if said.number is not None and expected.number is not None and not (answer_factor or expected_factor):
        return same_quantity(said.number, expected.number, factor)
    if any(number is not None and abs(number.exponent) > LARGEST_EXPONENT for number in (said.number, expected.number)):
        return False
    if factor != 1:
        answer_factor = rf"\frac{{{factor.numerator}}}{{{factor.denominator}}}"
    return Question(answer=latex(said, answer_factor), reference=latex(expected, expected_factor))


def radians(reading: Reading, other: Reading) -> str:
    r"""The factor for degrees beside radians: those of the other say so, or have no unit but a \pi."""
    if reading.unit is None or reading.unit.kinds != ANGLE:
        return ""
    if other.unit is None:
        return RADIANS if other.value is not None and r"\pi" in other.value else ""
    return RADIANS if other.unit.kinds == RADIAN else ""


def same_quantity(said: Number, expected: Number, factor: Fraction) -> bool:
    if factor == 1:
        return said.equals(expected)
    if max(abs(said.exponent), abs(expected.exponent), len(said.digits), len(expected.digits)) > 400:
        return False
    return fraction(said) * factor == fraction(expected)


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
