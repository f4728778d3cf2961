r"""Numbers with all of their digits written: decimals, percentages, powers of ten, and how fractions are written.

Invariant: no number is built from digits that a text writes as an exponent, so no exponent costs time or memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST_POWER = 4000  # digits of an exponent; Python refuses to read more than 4300
_NUMBER = re.compile(
    r"([+-]?) ?(\d+(?:\.\d*)?|\.\d+)"
    r"(?:[eE]([+-]?\d+)| ?\\(?:times|cdot) ?10 ?\^ ?(?:\{ ?([+-]?\d+) ?\}|([+-]?\d+)))?( ?\\?%)?"
)
_MIXED = re.compile(r"(?<![\w.}/^_)])(?<![\d,] )(\d{1,100}) (\d{1,100}) ?/ ?(\d{1,100})(?! ?(?!\\%)[\w/(^.\\{!])")
_BAR = re.compile(
    r"(?<![\d.])(\d{0,50})\.(\d{0,50}) ?\\(?:overline|bar|dot) ?(?:\{ ?(\d{1,50}) ?\}|(\d))(?! ?(?!\\%)[\d\\])"
)
_DOTS = re.compile(r"(?<![\d.])(\d{0,50})\.(\d{0,50})\\dot ?\{?(\d)\}?(\d{0,50})\\dot ?\{?(\d)\}?(?! ?\d)")
_CYCLE = re.compile(r"([+-]? ?)(\d{1,50})\.(\d{0,50})\((\d{1,50})\)")
_AND_SO_ON = re.compile(r"(?<![\d.])(\d{0,40})\.(\d{3,40}) ?\\ldots ?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """digits x 10^exponent, the digits as text without zeros at either end.

    >>> number_of("-1.50e3")
    Number(negative=True, digits='15', exponent=2, integer=False)
    """

    negative: bool
    digits: str
    exponent: int
    integer: bool
    """Whether it is written as an integer: digits, perhaps with a sign and a final period."""

    def equals(self, other: Number) -> bool:
        return (self.negative, self.digits, self.exponent) == (other.negative, other.digits, other.exponent)


def number_of(text: str) -> Number | None:
    """Returns the number that a text writes with its digits, in Python's or LaTeX's notation; else None."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    sign, mantissa, *powers, percent = match.groups()
    power = next((written for written in powers if written), None)
    if power is not None and len(power) > LONGEST_POWER:
        return None
    whole, _, decimals = mantissa.partition(".")
    digits = (whole + decimals).lstrip("0")
    significant = digits.rstrip("0")
    if not significant:
        return Number(negative=False, digits="0", exponent=0, integer=not (power or percent or decimals))
    exponent = int(power or 0) - len(decimals) + len(digits) - len(significant) - (2 if percent else 0)
    return Number(
        negative=sign == "-",
        digits=significant,
        exponent=exponent,
        integer=not (power or percent or decimals),
    )


def with_fractions(text: str) -> str:
    """Returns a text with mixed numbers and repeating decimals as fractions."""
    text = _MIXED.sub(_mixed, text)
    text = _DOTS.sub(lambda dots: _repeating(dots[1], dots[2], dots[3] + dots[4] + dots[5]), text)
    text = _BAR.sub(lambda bar: _repeating(bar[1], bar[2], bar[3] or bar[4]), text)
    cycle = _CYCLE.fullmatch(text)
    if cycle:
        return cycle[1] + _repeating(cycle[2], cycle[3], cycle[4])
    return _AND_SO_ON.sub(_and_so_on, text)


def _mixed(match: re.Match[str]) -> str:
    whole, numerator, denominator = match.groups()
    if not int(numerator) < int(denominator):
        return match[0]
    return rf"({whole}+\frac{{{numerator}}}{{{denominator}}})"


def _repeating(whole: str, decimals: str, block: str) -> str:
    """Returns the fraction that is written whole.decimals(block)(block)...

    >>> _repeating("0", "1", "6")
    '\\\\frac{15}{90}'
    """
    start = int(whole + decimals or "0")
    numerator = int(whole + decimals + block) - start
    return rf"\frac{{{numerator}}}{{{'9' * len(block)}{'0' * len(decimals)}}}"


def _and_so_on(match: re.Match[str]) -> str:
    """Returns the fraction of decimals that end in dots, if they show their block three times, or a longer one twice.

    Blocks of zeros or nines do not count: 12.999... is what a computer prints for something near 13.
    """
    whole, decimals = match.groups()
    for length in range(1, len(decimals) // 2 + 1):
        block = decimals[-length:]
        shown = decimals
        times = 0
        while shown.endswith(block):
            shown, times = shown[: -len(block)], times + 1
        if times >= (3 if length == 1 else 2) and set(block) not in ({"0"}, {"9"}):
            return _repeating(whole, shown, block)
    return match[0]
