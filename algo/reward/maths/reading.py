r"""Reads the content of a box as a person does, as far as its text tells: a number, a unit, words, or LaTeX.

Invariants
- These are pure functions of a text; nothing is evaluated.
- Digits that white space or a command for it separates are never joined, except groups of three in one number:
  `1{,}234`, `1,234`, `1\,234`, `1 234`. A comma with a space behind it separates a list: `1, 234` is two numbers.
- What a reading drops has no meaning (fences, fonts, a label such as "answer:") or is its `unit`. Words that change or
  deny a number ("or", "not", "about", "half") are no unit, and such a text equals only itself.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

from algo.reward.maths.label import OPTION, without_label, without_name_behind
from algo.reward.maths.number import Number, number_of, with_fractions
from algo.reward.maths.spelling import END, cleaned
from algo.reward.maths.unit import CLOSE, OPEN, Unit, named, without_unit
from algo.reward.maths.words import listed, marked, unmarked, words_of

LONGEST_TEXT = 6000  # characters, with ones such as ½ written out; longer texts are compared as they stand
_ZERO_TO_TWENTY = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen twenty"""
_NUMERALS = {word: number for number, word in enumerate(_ZERO_TO_TWENTY.split())}
SPOKEN_SETS = {
    f"{before}{name}": symbol
    for symbol, names in {
        r"\mathbb{R}": ("real numbers", "reals"),
        r"\mathbb{Z}": ("integers",),
        r"\mathbb{Q}": ("rational numbers", "rationals"),
    }.items()
    for name in names
    for before in ("all ", "set of ", "set of all ")
}
_BASED = re.compile(
    rf"\(?\s*(\d[0-9A-Fa-f]{{0,200}})\s*\)?\s*_\s*\{{?\s*(?:(\d{{1,2}})|{OPEN}([a-z]+){CLOSE})\s*\}}?"
    rf"|(\d[0-9A-Fa-f]{{0,200}})\s*{OPEN}base{CLOSE}\s*(?:(\d{{1,2}})|{OPEN}([a-z]+){CLOSE})"
)
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_CURRENCY = re.compile(
    rf"([+-]?)\s*(?:\\?(\$)|([€£¥₹])|\\(pounds|euro){END}|{OPEN}(USD|EUR|GBP|Rs){CLOSE}\.?)\s*(?=[-+\d.\\])"
)
_CURRENCIES = {
    "USD": "dollar",
    "EUR": "euro",
    "GBP": "gbp",
    "Rs": "rupee",
    "$": "dollar",
    "€": "euro",
    "£": "gbp",
    "¥": "yen",
    "₹": "rupee",
    "pounds": "gbp",
    "euro": "euro",
}
_CURRENCY_BEHIND = re.compile(r"(?<=[\d}]) ?(?:\\?(\$)|([€£¥₹]))\Z")
_DEGREE = re.compile(rf"\s*\^\\circ\s*(?:{OPEN}?([CF]){CLOSE}?)?\Z")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_MODULUS = re.compile(r"\s*\\pmod\s*\{\s*(\d+)\s*\}\Z")
_PER_CENT = re.compile(rf"{OPEN}per{CLOSE} ?{OPEN}cent{CLOSE}", re.IGNORECASE)
_PERCENT = re.compile(rf"\s*(?:\\?%|{OPEN}(?:percent|percentage|pct){CLOSE})\s*\Z")
_PERCENT_SIGN = re.compile(r" ?\\%\Z")
_CLOCK = re.compile(r"(\d{1,2})(?::([0-5]\d))?([ap])\.?m\.{0,2}", re.IGNORECASE)
_COMMA_GROUPS = re.compile(r"(?<![\d.,}])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_SPACED_GROUPS = re.compile(r"([+-]? ?)([1-9]\d{0,2}(?: \d{3})+)(?=\.\d|\Z| ?[\\\ue000])(?! ?\\ldots)")
_POWER_LETTER = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,6})(?![\w.])")
_BRACKET = re.compile(r"\\[{}]|[()\[\]]")
# A plain number has nothing to clean, group or measure. Most answers are such; a full reading costs 15 times more.
_PLAIN_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_SEPARATORS = (",", r"\lor", r"\land")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a text means, as far as it can be read without mathematics.

    text: one spelling for all texts that differ only in look.
    value: LaTeX without the unit, for the grader; None if only text and words can be compared.
    number: the value, if that is one number with all of its digits written; percentages are such.
    unit: the unit of the value.
    words: the words in lower case, if the text has nothing else ("no solution").
    option: the letter of a choice, `(C)`.
    base: the base of a number that is written with one, `101_2`; its `value` and `number` are in base ten.
    several: whether there is more than one thing outside of brackets: `12 or 13`, `1, 234`.
    """

    text: str
    value: str | None = None
    number: Number | None = None
    unit: Unit | None = None
    words: str | None = None
    option: str | None = None
    base: int | None = None
    several: bool = False


@functools.lru_cache(1024)  # of a group all have one reference, and many an answer
def read(content: str, *, beside_list: bool = False) -> Reading:
    r"""Reads a text of at most a few thousand characters.

    beside_list: the text is compared with a list, so `100,200` is two numbers.

    >>> read(r"**1\,234 cm**").value, read(r"\text{No solution.}").words, read(r"\text{(C)}").option
    ('1234', 'no solution', 'C')
    """
    if _PLAIN_NUMBER.fullmatch(content):
        return Reading(text=content, value=content, number=number_of(content))
    text = cleaned(content)
    if len(text) > LONGEST_TEXT:
        return Reading(text=text)
    text = marked(text)
    text, option, certain = without_label(text)
    if not certain:
        return Reading(text=unmarked(text))
    text = listed(without_name_behind(text))
    if not beside_list:
        text = _grouped(text)
    flat = _clock(unmarked(text))
    words = words_of(text)
    letter = OPTION.fullmatch(text)
    if letter and letter[0] != letter[1]:
        return Reading(text=letter[1], words=letter[1].lower(), option=letter[1], value=letter[1])
    if words in _NUMERALS:
        return Reading(text=flat, value=str(_NUMERALS[words]), words=words, number=number_of(f"{_NUMERALS[words]}.0"))
    if words is not None:
        return Reading(text=flat, words=words, option=option, value=SPOKEN_SETS.get(words))
    based = _based(text)
    if based is not None:
        digits, base = based
        return Reading(text=flat, value=digits, number=number_of(digits), base=base, option=option)
    value, unit = _measured(text)
    value = with_fractions(value)
    if OPEN in value:
        return Reading(text=flat, option=option)
    number = number_of(value)
    if number is None:
        value = _POWER_LETTER.sub(r"(\1\\times 10^{\2})", value)
    several = any(separator in part for part in _outside_brackets(value)[::2] for separator in _SEPARATORS)
    return Reading(text=flat, value=value, number=number, unit=unit, option=option, several=several)


def without_percent(reading: Reading) -> Reading:
    """Returns the reading of 25 for that of 25 %; others as they are."""
    if reading.value is None or not _PERCENT_SIGN.search(reading.value):
        return reading
    value = _PERCENT_SIGN.sub("", reading.value)
    return replace(reading, text=value, value=value, number=number_of(value))


def is_list(content: str) -> bool:
    """Returns whether a comma, "and" or "or" separates things, in brackets too; a comma in a number does not count."""
    if _PLAIN_NUMBER.fullmatch(content):
        return False
    text = _grouped(listed(without_label(marked(cleaned(content)))[0]))
    return any(separator in text for separator in _SEPARATORS)


def _clock(flat: str) -> str:
    """Returns a time of day in one spelling; other texts as they are."""
    clock = _CLOCK.fullmatch(flat)
    if clock is None or not 1 <= int(clock[1]) <= 12:
        return flat
    return f"{int(clock[1])}:{clock[2] or '00'} {clock[3].lower()}m"


def _outside_brackets(text: str) -> list[str]:
    """Returns the parts of a text outside of brackets, with the parts inside as the odd items between them."""
    parts, depth, start = [], 0, 0
    for bracket in _BRACKET.finditer(text):
        opens = bracket[0] in ("(", "[", r"\{")
        if opens and depth == 0:
            parts.append(text[start : bracket.start()])
            start = bracket.start()
        depth = max(0, depth + (1 if opens else -1))
        if not opens and depth == 0:
            parts.append(text[start : bracket.end()])
            start = bracket.end()
    return [*parts, text[start:]]


def _grouped(text: str) -> str:
    """Returns a text without what separates the digits of one number into groups of three."""
    text = _SPACED_GROUPS.sub(lambda group: group[1] + group[2].replace(" ", ""), text, count=1)
    parts = _outside_brackets(text)
    if any("," in _COMMA_GROUPS.sub("", part) for part in parts[::2]):
        return text
    parts[::2] = [_COMMA_GROUPS.sub(lambda group: group[0].replace(",", ""), part) for part in parts[::2]]
    return "".join(parts)


def _based(text: str) -> tuple[str, int] | None:
    """Returns the digits in base ten of a number that is written with its base, and that base; else None."""
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    digits, written, name = match.groups()[:3] if match[1] else match.groups()[3:]
    base = int(written) if written else _BASES.get(name, 0)
    try:
        return str(int(digits, base)), base
    except ValueError:
        return None


def _measured(text: str) -> tuple[str, Unit | None]:
    """Returns the value and the unit of a text."""
    text = _PER_CENT.sub(f"{OPEN}percent{CLOSE}", text)
    unit = None
    currency = _CURRENCY.match(text)
    if currency:
        sign, *symbols = currency.groups()
        unit = named(_CURRENCIES[next(symbol for symbol in symbols if symbol)])
        text = sign + text[currency.end() :]
    currency_behind = None if currency else _CURRENCY_BEHIND.search(text)
    if currency_behind:
        unit = named(_CURRENCIES[currency_behind[1] or currency_behind[2]])
        text = text[: currency_behind.start()]
    degree = _DEGREE.search(text)
    if degree and unit is None and not _TRIGONOMETRY.search(text):
        unit = named({"C": "celsius", "F": "fahrenheit"}.get(degree[1], "degree"))
        return text[: degree.start()].strip(), unit
    text, behind, power = without_unit(text)
    if behind and behind != unit:
        unit = unit * behind if unit else behind
    if power:
        text = rf"{text}\times 10^{{{power}}}" if number_of(text) else rf"({text})\cdot 10^{{{power}}}"
    modulus = _MODULUS.search(text)
    if modulus and unit is None:
        text = text[: modulus.start()]
        unit = Unit(kinds=((f"modulo {modulus[1]}", 1),))
    text = _PERCENT.sub(r"\\%", text)
    return text.strip(), unit
