r"""Units of measurement in answers: `cm^2`, `square inches`, `dollars per hour`.

Invariants
- A unit is a product of words with powers. Words for one thing ("hours", "hr") have one name; a word that is not listed
  names a unit of its own, without its plural ("apples", "apple").
- A unit whose dimensions cancel ("hours per week") is a unit too.
- Words that change or deny a number ("or", "not", "about", "half", "thirds") are no unit: `unit_of` returns None.
- Each factor has one power of one digit, and a unit has at most MOST_FACTORS factors, so its size is quickly computed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

OPEN, CLOSE = "\ue000", "\ue001"  # stand around each word of a text (`algo.reward.maths.words`)
WORD = rf"{OPEN}([^{CLOSE}]*){CLOSE}"

_LENGTHS = {
    "mm millimeter millimetre": Fraction(1, 1000),
    "cm centimeter centimetre": Fraction(1, 100),
    "dm decimeter decimetre": Fraction(1, 10),
    "m meter metre": Fraction(1),
    "km kilometer kilometre": Fraction(1000),
    "in inch inches": Fraction(254, 10000),
    "ft foot feet": Fraction(3048, 10000),
    "yd yard": Fraction(9144, 10000),
    "mi mile": Fraction(1609344, 1000),
}
_TIMES = {
    "s sec second": Fraction(1),
    "min minute": Fraction(60),
    "h hr hour": Fraction(3600),
    "day": Fraction(86400),
    "week wk": Fraction(604800),
}
_MASSES = {
    "mg milligram": Fraction(1, 1000),
    "g gm gram": Fraction(1),
    "kg kilogram": Fraction(1000),
    "oz ounce": Fraction(45359237, 1600000),
    "lb lbs pound": Fraction(45359237, 100000),
}
_OTHERS = {
    "month": {"month": Fraction(1), "year yr": Fraction(12)},
    "volume": {"ml milliliter millilitre cc": Fraction(1, 1000), "l liter litre": Fraction(1)},
    "gallon": {"gallon gal": Fraction(1)},
    "money": {"dollar usd buck": Fraction(1), "cent": Fraction(1, 100)},
    "euro": {"euro eur": Fraction(1)},
    "gbp": {"gbp": Fraction(1)},
    "rupee": {"rupee rs inr": Fraction(1)},
    "yen": {"yen": Fraction(1)},
    "angle": {"degree deg": Fraction(1)},
    "radian": {"radian rad": Fraction(1)},
    "celsius": {"celsius": Fraction(1)},
    "fahrenheit": {"fahrenheit": Fraction(1)},
    "person": {"person people": Fraction(1)},
    "man": {"man men": Fraction(1)},
    "woman": {"woman women": Fraction(1)},
    "child": {"child children": Fraction(1)},
    "way": {"way": Fraction(1)},
}
_KINDS = {"length": _LENGTHS, "time": _TIMES, "mass": _MASSES, **_OTHERS}
# Each word, with its kind and its size in that kind.
_WORDS = {
    word: (kind, size) for kind, names in _KINDS.items() for spelled, size in names.items() for word in spelled.split()
}
# Words for a quotient, with numerator and denominator.
_QUOTIENTS = {"mph": ("mile", "hour"), "kmh": ("km", "hour"), "kph": ("km", "hour"), "kmph": ("km", "hour")}

_SQUARE = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_FILLERS = frozenset(("of", "the", "a", "an", "in", "total"))
# Words behind a number that may change it or take it back.
_CHANGING = """
or and not no nor but if when for where unless except is are was be isn't aren't than then more less fewer least most
greater smaller larger higher lower bigger over under above below about approximately approx around roughly nearly
almost circa maybe perhaps possibly probably likely wrong incorrect false untrue unsure guess otherwise else either
neither both without plus minus times divided multiplied by to from through until up down mod modulo base squared
cubed factorial power root half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh
sevenths eighth eighths ninth ninths tenth tenths eleventh elevenths twelfth twelfths twentieth twentieths hundredth
hundredths thousandth thousandths millionth millionths percent percentage pct zero one two three four five six seven
eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty
sixty seventy eighty ninety hundred thousand million billion trillion hundreds thousands millions billions trillions
dozen dozens pair pairs score couple double triple twice thrice negative positive off instead rather actually
correction should does doesn't cannot can't won't some any all every other another error undefined infinity infinitely
infinite imaginary inclusive exclusive respectively with remainder pi sqrt between too reciprocal inverse opposite
quadrillion quintillion googol gross grand lakh lakhs crore crores myriad
"""
# Fractions, in addition to those above.
_PARTS = """
thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth thirtieth fortieth fiftieth sixtieth
seventieth eightieth ninetieth billionth trillionth quadrillionth
"""
_NO_UNITS = frozenset(_CHANGING.split()) | frozenset(
    f"{part}{plural}" for part in _PARTS.split() for plural in ("", "s")
)
MOST_FACTORS = 20
_PART = re.compile(rf"{WORD}|\^\s*(?:\{{\s*(-?\d)\s*\}}|(-?\d))|(/)|\\cdot|[\s.()]")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"\s*{OPEN}({'|'.join(_SCALES)}){CLOSE}", re.IGNORECASE)
# Matches a piece of a text's last words: the first group joins them to what is before, the second is a word.
_PIECE = re.compile(rf"(\s|[(/]|\\cdot)|({WORD})|[.)]|\^\s*(?:\{{\s*-?\d\s*\}}|-?\d)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A product of powers of kinds, sorted by name, and its size: `km` is ("length", 1) of size 1000.

    A power of 0 stays if all powers are 0, so inches per foot are not hours per day.

    >>> unit_of(f"{OPEN}km{CLOSE}/{OPEN}h{CLOSE}")
    Unit(kinds=(('length', 1), ('time', -1)), size=Fraction(5, 18))
    """

    kinds: tuple[tuple[str, int], ...]
    size: Fraction = Fraction(1)

    def __mul__(self, other: Unit) -> Unit:
        powers = dict(self.kinds)
        for kind, power in other.kinds:
            powers[kind] = powers.get(kind, 0) + power
        kept = {kind: power for kind, power in powers.items() if power} or powers
        kinds = tuple(sorted(kept.items()))
        return Unit(kinds=kinds, size=self.size * other.size)

    def __pow__(self, exponent: int) -> Unit:
        return Unit(kinds=tuple((kind, power * exponent) for kind, power in self.kinds), size=self.size**exponent)


NONE = Unit(kinds=())
_OF_ONE_LETTER = frozenset("NJWVACFT")
_MONEY = frozenset(("money", "euro", "gbp", "rupee", "yen"))


def may_be_no_unit(unit: Unit) -> bool:
    r"""Returns whether a unit has a letter that may mean a variable or a thousand: `5\text{x}`, `\$20\text{K}`."""
    letters = [kind for kind, power in unit.kinds if len(kind) == 1 and power == 1 and kind not in _OF_ONE_LETTER]
    return bool(letters) and all(kind in letters or kind in _MONEY for kind, _ in unit.kinds)


def named(word: str) -> Unit:
    """Returns the unit that one word names."""
    lower = word if len(word) == 1 and word != "L" else word.lower()
    if lower in _QUOTIENTS:
        above, below = _QUOTIENTS[lower]
        return named(above) * named(below) ** -1
    for name in (lower, lower.removesuffix("s"), lower.removesuffix("es")):
        if name in _WORDS:
            kind, size = _WORDS[name]
            return Unit(kinds=((kind, 1),), size=size)
    plural = len(lower) > 3 and lower.endswith("s") and not lower.endswith("ss")
    return Unit(kinds=((lower.removesuffix("s") if plural else lower, 1),))


def denies(word: str) -> bool:
    """Returns whether a word beside a number may change it or take it back."""
    return any(part in _NO_UNITS or part.endswith("fold") for part in word.lower().split("-"))


def unit_of(text: str) -> Unit | None:
    """Returns the unit that marked words name; None if they name none."""
    factors: list[Unit] = []
    signs: list[int] = []
    sign, dimension = 1, 1
    raised = False  # whether the last factor has its power
    position = 0
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            return None
        position = part.end()
        word = (part[1] or "").lower()
        power = part[2] or part[3]
        if denies(word) or (power and (raised or not factors)):
            return None
        if word == "per" or part[4]:
            sign = -1
        elif word in _SQUARE:
            dimension = _SQUARE[word]
        elif power:
            factors[-1] **= int(power)
            raised = True
        elif word and not (word in _FILLERS and factors):
            if len(factors) == MOST_FACTORS:
                return None
            factors.append(named(part[1]) ** dimension)
            signs.append(sign)
            dimension, raised = 1, False
    unit = NONE
    for factor, exponent in zip(factors, signs, strict=True):
        unit *= factor**exponent
    return unit if factors else None


def without_unit(text: str) -> tuple[str, Unit | None, int]:
    """Returns a text without the unit at its end, the unit, and the power of ten of a word such as "million" before it.

    The text keeps its last words if they are no unit.
    """
    start = _last_words(text)
    if start is None:
        return text, None, 0
    value, behind = text[:start], text[start:]
    scale = _SCALE.match(behind)
    power = _SCALES[scale[1].lower()] if scale else 0
    behind = behind[scale.end() :] if scale else behind
    if not value.strip() or behind.count("(") != behind.count(")"):
        return text, None, 0
    if not behind.strip(" ."):
        return value, None, power
    unit = unit_of(behind)
    return (value, unit, power) if unit else (text, None, 0)


def _last_words(text: str) -> int | None:
    """Returns where the words at the end of a text begin, with what joins them to the rest; None without such."""
    begin, in_words, position = 0, False, 0
    while position < len(text):
        piece = _PIECE.match(text, position)
        if piece is None:
            position += 1
            begin, in_words = position, False
            continue
        position = piece.end()
        if piece[2] is not None:
            in_words = True
        elif piece[1] is None and not in_words:
            begin = position
    return begin if in_words else None
