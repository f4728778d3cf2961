r"""How a person reads the content of a box, as far as its text tells: a number, a unit, words, or LaTeX for the grader.

Invariants
- Pure functions of a text; nothing is evaluated, and no number is built from digits that a text writes as an exponent.
- Digits that white space or a command for it parts are never joined, but for groups of three of one number:
  `1{,}234`, `1,234`, `1\,234`, `1 234`. A comma with a space behind it parts a list: `1, 234` is two numbers.
- What a reading drops means nothing (fences, fonts, a label such as "answer:") or is its `unit`. Words that change or
  deny a number ("or", "not", "about", "half") are no unit, and such a text equals only itself.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace

from algo.reward.math_unit import CLOSE, OPEN, WORD, Unit, denies, named, without_unit

LONGEST_TEXT = 6000  # with characters such as ½ written out; of an answer that is all such only the text is compared
LONGEST_POWER = 4000  # digits of an exponent: Python refuses to read more than 4300

_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad" + OPEN + CLOSE))
_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d", "-")
    | dict.fromkeys("°º˚", r"^\circ ")
    | dict.fromkeys("×✕✖⨯", r"\times ")
    | dict.fromkeys("·⋅∙•", r"\cdot ")
    | dict.fromkeys("⁄∕", "/")
    | dict.fromkeys("≤⩽", r"\le ")
    | dict.fromkeys("≥⩾", r"\ge ")
    | {"÷": r"\div ", "√": r"\sqrt ", "∛": r"\sqrt[3] ", "∞": r"\infty ", "≠": r"\neq ", "≈": r"\approx ", "≡": "="}
    | {"±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "∖": r"\setminus "}
    | {"ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "⟨": r"\langle ", "⟩": r"\rangle ", "∣": "|", "′": "'", "’": "'"}
    | {"π": r"\pi ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon "}
    | {"θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu ", "ρ": r"\rho ", "σ": r"\sigma ", "τ": r"\tau "}
    | {"¢": r"\text{ cents}", "φ": r"\phi ", "ϕ": r"\phi ", "ω": r"\omega "}
    | {"Δ": r"\Delta ", "Ω": r"\Omega ", "…": r"\ldots "}
)
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_VULGAR_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e]")

_END = r"(?![A-Za-z])"  # of a command's name
_LOOK = re.compile(
    rf"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits|bf|it|sf|tt|em){_END}\.?"
    rf"|\\(?:boxed|fbox|underline|underbrace|boldsymbol|bm|pmb|mathnormal|ensuremath){_END}"
    r"|\\(?:color|textcolor)\s*\{[^{}]*\}"
)
_SPACE = rf"(?<!\\)\\(?:[,;:> \n]|(?:quad|qquad|thinspace|enspace|medspace|thickspace|space){_END})|~"
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r",\s*\\!\s*|\{\s*,\s*\}", "{,}"),  # before the spaces go: what parts groups of digits
        (rf"\{{([^{{}}]*)\\choose{_END}([^{{}}]*)\}}", r"\\binom{\1}{\2}"),
        (rf"(?<!\\)\\!|(?<!\\)\\/|\\negthinspace{_END}", ""),
        (_SPACE, " "),
        (rf"\\(?:ldots|dots|cdots|dotsc|dotsb|textellipsis){_END}|\.{{3,}}", r"\\ldots "),
        (rf"\\[dtc]frac{_END}", r"\\frac "),
        (rf"\\[dt]binom{_END}", r"\\binom "),
        (rf"\\degree{_END}|\^\s*\{{\s*\\circ\s*\}}|\^\s*\\circ{_END}", r"^\\circ "),
        (rf"\\(?:leqslant|leqq|leq){_END}|<=", r"\\le "),
        (rf"\\(?:geqslant|geqq|geq){_END}|>=", r"\\ge "),
        (rf"\\ne{_END}|!=|\\not\s*=", r"\\neq "),
        (rf"\\lt{_END}", "<"),
        (rf"\\gt{_END}", ">"),
        (rf"==|\\equiv{_END}|\\colon\s*=|:=", "="),
        (rf"\\varnothing{_END}|\\\{{\s*\\\}}", r"\\emptyset "),
        (rf"\\lbrace{_END}", r"\\{"),
        (rf"\\rbrace{_END}", r"\\}"),
        (rf"\\[lr]?vert{_END}", "|"),
        (rf"\\backslash{_END}", r"\\setminus "),
        (rf"\\mod{_END}", r"\\bmod "),
        (r"\\pmod\s*(\d+)|\(\s*\\bmod\s*(\d+)\s*\)", r"\\pmod{\1\2}"),
        (r"\*\*", "^"),
        (rf"\\ast{_END}|\*", r"\\cdot "),
        (r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "),
        (r"\\begin\s*\{array\}\s*\{[lcr\s]*\}", r"\\begin{matrix}"),
        (r"\\end\s*\{array\}", r"\\end{matrix}"),
        (r"\\(begin|end)\s*\{smallmatrix\}", r"\\\1{matrix}"),
        (r"(?<=\d)\s?[xX]\s?10\s?\^", r"\\times 10^"),
    )
]
_FENCES = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\*\*(?!\*)(.+)\*\*",
        r"__(.+)__",
        r"`+([^`]+)`+",
        r"\$\$((?:[^$\\]|\\.)+)\$\$",
        r"\$((?:[^$\\]|\\.)+)\$",
        r"\\\((.+)\\\)",
        r"\\\[(.+)\\\]",
        r"\"([^\"]+)\"",
        "\u201c(.+)\u201d",
    )
]
# A text command with its content, which is words or mathematics of its own.
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|sc|normal|up|md)?|[mh]box|operatorname\*?|emph)\s*\{([^{}]*)\}"
    r"|\\math(rm|bf|it|sf|tt)\s*\{([^{}]*)\}|\{\s*\\(?:rm|text)\s+([^{}]*)\}"
)
_RUN = re.compile(rf"\\(?:begin|end)\s*\{{[^{{}}]*\}}|\\[A-Za-z]+|{WORD}|[A-Za-z]{{2,}}|[^\W\d_a-zA-Z]+")
_FUNCTION_NAMES = (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp sqrt gcd lcm max min binom frac"
)
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_NAMES = {"pi": r"\pi ", "oo": r"\infty ", "inf": r"\infty ", "infinity": r"\infty ", "infty": r"\infty "}
# Runs of two or three letters that are words also outside of \text; other runs are products of variables.
_SHORT = """
or and not is the to of no yes odd even if cm km kg mg mm ft lb lbs oz sec min hr hrs day mph kmh kph deg rad sq cu ml
gal yd cup pie way men man usd eur are for dne ans all any two one six ten mod per pct boy egg toy bag box car pen hat
cat dog bus rs
"""
_SHORT_WORDS = frozenset(_SHORT.split())
_LABEL = re.compile(
    rf"\A\s*(?:{OPEN}(?:the|so|thus|hence|therefore|our|my|final|correct|answer|answers|ans|result|solution|solutions|value"
    rf"|is|are|equals|we|get|that|it|there|option|choice){CLOSE}[\s,]*)+[:=]?\s*(?=[^\s.,!?])",
    re.IGNORECASE,
)
# A part of the name of a number: `\text{Area of }\triangle ABC`.
_NAME_PART = re.compile(rf"\s*(?:{WORD}|\\(?:triangle|angle){_END}|[A-Z]{{2,4}}{_END}|[A-Za-z]{_END})")
_NAME_END = re.compile(r"\s*[:=]\s*(?=\S)")
_IS = frozenset(("is", "are", "was", "equal", "equals"))
# Words that change a number beside it, but not as part of its name: "the remainder is 3".
_OF_A_NAME = _IS | frozenset(("remainder", "base", "power", "factorial", "root", "score", "pair", "pairs", "with"))
_OPTION = re.compile(rf"\(?\s*{OPEN}?([A-Z]){CLOSE}?\s*\)?")
_OPTION_LABEL = re.compile(
    rf"\s*(?:\(\s*{OPEN}?([A-J]){CLOSE}?\s*\)\s*|{OPEN}?([A-J]){CLOSE}?\s*[.:)]\s+)(?=[^\s,;^_/+=-])"
    rf"|\s*\(\s*{OPEN}([A-J]){CLOSE}\s*\)\s*(?=[^\s,;])"
)
# What behind the label of an option says that the answer is not just that one. "Both (A) and (B)" may be an option.
_OTHER_OPTION = re.compile(
    rf"(?<![^\s,;{OPEN}])(?:\(\s*{OPEN}?[A-J]{CLOSE}?\s*\)|[A-J]{CLOSE}?\s?[.:)]\s)"
    rf"|(?:{OPEN}(?:or|and){CLOSE}|[,;])\s*{OPEN}?[A-J]{CLOSE}?(?![A-Za-z])"
)
_SEVERAL_OPTIONS = re.compile(rf"\s*{OPEN}(?:both|neither|none|all|only){CLOSE}", re.IGNORECASE)
_TAKEN_BACK = re.compile(rf"\s*{OPEN}(?:is|are|was|isn't|or|and|nor){CLOSE}", re.IGNORECASE)
# A short run of letters behind a word is one too, "years old", but for what joins or introduces formulas.
_RUN_BEHIND = re.compile(
    rf"(?<={CLOSE} )(?<!{OPEN}and{CLOSE} )(?<!{OPEN}or{CLOSE} )(?<!{OPEN}is{CLOSE} )(?<!{OPEN}are{CLOSE} )"
    rf"([A-Za-z]{{2,3}}|a)(?= |\Z|{OPEN})"
)
# Names of functions that are units behind a number, a word or "per".
_MIN_OR_SEC = re.compile(rf"(?<=[\d}}/{CLOSE}])\s?\\(min|sec)\s?(?=\Z|[.,;/)]|{OPEN})|(?<=/)\\(sec) ?(?=\^)")
# Short words that are products of variables: `\pi hr^2`, `\frac{mg}{k}`, but not `2 hr`.
_PRODUCT = re.compile(r"(\A|(?<!\\)\\[A-Za-z]+ |[{}(+*=-])(mg|hr|rs)(?![A-Za-z])")
_MODULO = re.compile(rf"\(\s*{OPEN}mod{CLOSE}\s*(\d+)\s*\)")
_RATIO = re.compile(rf"\A(\d{{1,50}})\s?{OPEN}to{CLOSE}\s?(\d{{1,50}})\Z")
_AND = re.compile(rf"\s*,?\s*{OPEN}(and|or|And|Or|AND|OR){CLOSE}\s*")

_ARTICLE = re.compile(rf"\A(?:an?|{OPEN}(?:an?|the){CLOSE})\s+(?={OPEN})", re.IGNORECASE)

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
    rf"([+-]?)\s*(?:\\?(\$)|([€£¥₹])|\\(pounds|euro){_END}|{OPEN}(USD|EUR|GBP|Rs){CLOSE}\.?)\s*(?=[-+\d.\\])"
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
_BRACED_GROUPS = re.compile(r"(?<![\d.}])[1-9]\d{0,2}(?:\{,\}\d{3})+(?![\d{])")
_SPACED_GROUPS = re.compile(r"([+-]? ?)([1-9]\d{0,2}(?: \d{3})+)(?=\.\d|\Z| ?[\\\ue000])(?! ?\\ldots)")
_DECIMAL_COMMA = re.compile(r"(?<![\d.,}])(\d+)\{,\}(\d+)(?![\d{])")
_NUMBER = re.compile(
    r"([+-]?) ?(\d+(?:\.\d*)?|\.\d+)"
    r"(?:[eE]([+-]?\d+)| ?\\(?:times|cdot) ?10 ?\^ ?(?:\{ ?([+-]?\d+) ?\}|([+-]?\d+)))?( ?\\?%)?"
)
_POWER_LETTER = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,6})(?![\w.])")
_MIXED = re.compile(r"(?<![\w.}/^_)])(?<![\d,] )(\d{1,100}) (\d{1,100}) ?/ ?(\d{1,100})(?! ?(?!\\%)[\w/(^.\\{!])")
_BAR = re.compile(
    r"(?<![\d.])(\d{0,50})\.(\d{0,50}) ?\\(?:overline|bar|dot) ?(?:\{ ?(\d{1,50}) ?\}|(\d))(?! ?(?!\\%)[\d\\])"
)
_DOTS = re.compile(r"(?<![\d.])(\d{0,50})\.(\d{0,50})\\dot ?\{?(\d)\}?(\d{0,50})\\dot ?\{?(\d)\}?(?! ?\d)")
_CYCLE = re.compile(r"([+-]? ?)(\d{1,50})\.(\d{0,50})\((\d{1,50})\)")
_AND_SO_ON = re.compile(r"(?<![\d.])(\d{0,40})\.(\d{3,40}) ?\\ldots ?")
_BRACKET = re.compile(r"\\[{}]|[()\[\]]")
# Has nothing to clean, label, group or measure. Most answers are such, and the long way takes fifteen times as long.
_PLAIN_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """digits x 10^exponent: the digits as text without zeros at either end. So no exponent costs time or memory.

    >>> number_of("-1.50e3")
    Number(negative=True, digits='15', exponent=2, integer=False)
    """

    negative: bool
    digits: str
    exponent: int
    integer: bool
    """Written as an integer: digits, perhaps with a sign and a final period."""

    def equals(self, other: Number) -> bool:
        return (self.negative, self.digits, self.exponent) == (other.negative, other.digits, other.exponent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a text says.

    text: one spelling for all texts that differ in look only.
    value: LaTeX without the unit, for the grader; None where only texts and words can be compared.
    number: the value where it is one number with all its digits written, a percentage included.
    words: a text of nothing but words, in lower case ("no solution"); option: a letter as choices have it, `(C)`.
    several: whether it gives more than one thing, outside of brackets: `12 or 13`, `1, 234`.
    base: of a number written with its base, `101_2`; its `value` and `number` are in base ten.
    """

    text: str
    value: str | None = None
    number: Number | None = None
    unit: Unit | None = None
    words: str | None = None
    option: str | None = None
    base: int | None = None
    several: bool = False


_SEPARATORS = (",", r"\lor", r"\land")


def read(content: str, *, beside_list: bool = False) -> Reading:
    r"""The reading of a text of a few thousand characters at most.

    beside_list: it is compared with a list, so `100,200` is two numbers.

    >>> read(r"**1\,234 cm**").value, read(r"\text{No solution.}").words, read(r"\text{(C)}").option
    ('1234', 'no solution', 'C')
    """
    if _PLAIN_NUMBER.fullmatch(content):
        return Reading(text=content, value=content, number=number_of(content))
    text = _cleaned(content)
    if len(text) > LONGEST_TEXT:
        return Reading(text=text)
    text = _marked(text)
    text, option, certain = _without_label(text)
    if not certain:
        return Reading(text=_flat(text))
    text = _listed(_without_name_behind(text))
    if not beside_list:
        text = _grouped(text)
    flat = _clock(_flat(text))
    words = _words(text)
    letter = _OPTION.fullmatch(text)
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
    value = _fractions(value)
    if OPEN in value:
        return Reading(text=flat, option=option)
    number = number_of(value)
    if number is None:
        value = _POWER_LETTER.sub(r"(\1\\times 10^{\2})", value)
    several = any(separator in part for part in _outside_brackets(value)[::2] for separator in _SEPARATORS)
    return Reading(text=flat, value=value, number=number, unit=unit, option=option, several=several)


def without_percent(reading: Reading) -> Reading:
    """Without the percent sign at its end, if it has one: as if 25 were written for 25 %."""
    if reading.value is None or not _PERCENT_SIGN.search(reading.value):
        return reading
    value = _PERCENT_SIGN.sub("", reading.value)
    return replace(reading, text=value, value=value, number=number_of(value))


def is_list(content: str) -> bool:
    """Whether a comma, "and" or "or" parts things in the text, in brackets too: no comma between groups of a number."""
    if _PLAIN_NUMBER.fullmatch(content):
        return False
    text = _grouped(_listed(_without_label(_marked(_cleaned(content)))[0]))
    return any(separator in text for separator in _SEPARATORS)


def number_of(text: str) -> Number | None:
    """The number that a text writes with its digits, in Python's or in LaTeX's notation; else None."""
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        return None
    sign, mantissa, *powers, percent = found.groups()
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


def _cleaned(text: str) -> str:
    """In LaTeX's characters, one command for each meaning, without what only changes the look."""
    text = text.translate(_INVISIBLE)
    text = _RAISED.sub(lambda run: "^{" + unicodedata.normalize("NFKC", run[0]).replace("\u2212", "-") + "}", text)
    text = _LOWERED.sub(lambda run: "_{" + unicodedata.normalize("NFKC", run[0]) + "}", text)
    text = _VULGAR_FRACTION.sub(_vulgar_fraction, text)
    text = "".join(map(_plain_character, text.translate(_CHARACTERS))).translate(_CHARACTERS)
    for pattern, replacement in _SPELLINGS[:4]:
        text = pattern.sub(replacement, text)
    text = _unfenced(_LOOK.sub(" ", _unfenced(text)))
    for pattern, replacement in _SPELLINGS[4:]:
        text = pattern.sub(replacement, text)
    text = _BRACED_GROUPS.sub(lambda group: group[0].replace("{,}", ""), text)
    text = _DECIMAL_COMMA.sub(r"\1.\2", text)
    return _trimmed(re.sub(r"\s+", " ", text))


def _plain_character(character: str) -> str:
    """Of full-width digits and bold letters the usual ones; what stands for several, or numbers a thing (①), stays."""
    if unicodedata.category(character) == "No":
        return character
    plain = unicodedata.normalize("NFKC", character)
    return plain if len(plain) == 1 else character


def _vulgar_fraction(found: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", found[0]).partition("\u2044")
    return rf"\frac{{{numerator}}}{{{denominator or 1}}}"


def _unfenced(text: str) -> str:
    """Without fences around the whole of it, and without what ends a sentence or a line."""
    for _ in range(8):
        before = text
        text = _trimmed(text)
        for fence in _FENCES:
            inner = fence.fullmatch(text)
            text = inner[1] if inner else text
        if text == before:
            break
    return text


def _trimmed(text: str) -> str:
    before = None
    while text != before:
        before = text
        text = text.strip().removesuffix("\\\\").removesuffix(r"\newline").rstrip(",;")
        text = text[:-1] if text.endswith("\\") else text  # of a space after it, which is gone
        text = text[:-1] if text.endswith(".") and not text.endswith("..") else text
    while text.startswith("{") and _closes(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _closes(text: str, start: int) -> int:
    """Where the brace closes that opens at `start`; -1 if it does not."""
    depth = 0
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += (found[0] == "{") - (found[0] == "}")
        if depth == 0:
            return found.start()
    return -1


def _marked(text: str) -> str:
    r"""With each word between OPEN and CLOSE: what \text has, and runs of letters that are no mathematics."""
    for _ in range(4):
        inner = _TEXT.sub(_text_content, text)
        if inner == text:
            break
        text = inner
    text = _PRODUCT.sub(lambda found: found[1] + " ".join(found[2]), text)
    text = _RUN.sub(_run, text)
    text = re.sub(r"\s+", " ", text)
    text = _MIN_OR_SEC.sub(lambda found: f" {OPEN}{found[1] or found[2]}{CLOSE} ", text)
    text = _MODULO.sub(r"\\pmod{\1}", text)
    for _ in range(3):
        text = _RUN_BEHIND.sub(rf"{OPEN}\1{CLOSE}", text)
    return _RATIO.sub(r"\1:\2", re.sub(r"\s+", " ", text).strip())


def _text_content(found: re.Match[str]) -> str:
    plain, font, symbols, roman = found.groups()
    content = plain if plain is not None else symbols if symbols is not None else roman
    name = content.strip()
    if name in _FUNCTIONS:
        return rf"\{name} "
    if font and len(name) == 1 and (font != "rm" or name in "eid"):
        return name
    return " " + re.sub(r"(?<![\\A-Za-z])[^\W\d_]+(?:['-][^\W\d_]+)*", lambda run: OPEN + run[0] + CLOSE, content) + " "


def _run(found: re.Match[str]) -> str:
    run = found[0]
    if run.startswith(("\\", OPEN)):
        return run
    lower = run.lower()
    if run in _FUNCTIONS:
        return rf"\{run} "
    if lower in _NAMES:
        return _NAMES[lower]
    if not run.isascii() or len(run) >= 4 or (lower in _SHORT_WORDS and run not in ("Mm", "mM")):
        return OPEN + run + CLOSE
    return run


def _without_label(text: str) -> tuple[str, str | None, bool]:
    """Without "The answer is", "Area =", "(A)" before an answer; the letter of that option; whether it has no other."""
    text = _LABEL.sub("", text, count=1)
    option = _OPTION_LABEL.match(text)
    if option is None:
        for _ in range(3):
            text = text[_name_end(text) :]
        option = _OPTION_LABEL.match(text)
    if option is None or _OPTION.fullmatch(text[option.end() :]):
        return _unfenced(text), None, True
    rest = text[option.end() :]
    several = _OTHER_OPTION.search(rest) and not _SEVERAL_OPTIONS.match(rest)
    if several or _TAKEN_BACK.match(rest):
        return _unfenced(text), None, False
    return _unfenced(rest), option[1] or option[2] or option[3], True


def _name_end(text: str) -> int:
    """Where the name of an answer ends that stands before it: "Area =", "The number of ways is"; else 0."""
    words, position = _name(text, 0)
    separator = _NAME_END.match(text, position)
    if words and words[-1] in _IS and text[position:].strip():
        end = position
    elif separator and text.lstrip().startswith(OPEN):
        end = separator.end()
    else:
        return 0
    return end if _names(words) else 0


def _name(text: str, start: int) -> tuple[list[str], int]:
    """The words of a name that begins at `start`, up to the first "is", and where they end."""
    words: list[str] = []
    position = start
    while part := _NAME_PART.match(text, position):
        position = part.end()
        if part[1] is not None:
            words.append(part[1].lower())
            if words[-1] in _IS:
                break
    return words, position


def _names(words: list[str]) -> bool:
    """Whether words only say what a number is, and neither change it nor take it back; "at least" does."""
    for before, word in zip(["", *words], words, strict=False):
        superlative = word in ("least", "most") and before != "at"
        if denies(word) and word not in _OF_A_NAME and not superlative:
            return False
    return True


def _without_name_behind(text: str) -> str:
    r"""Without what a number is said to be: `24 = \text{Area}`."""
    value, equals, behind = text.rpartition("=")
    if not equals or not behind.lstrip().startswith(OPEN) or not re.search(r"\d", value):
        return text
    words, end = _name(behind, 0)
    return value.rstrip() if end == len(behind.rstrip()) and _names(words) else text


def _clock(flat: str) -> str:
    """A time of day in one spelling."""
    found = _CLOCK.fullmatch(flat)
    if found is None or not 1 <= int(found[1]) <= 12:
        return flat
    return f"{int(found[1])}:{found[2] or '00'} {found[3].lower()}m"


def _listed(text: str) -> str:
    """With "and" and "or" between mathematics as symbols."""
    if _words(text) is not None:
        return text
    return _AND.sub(lambda found: r" \lor " if found[1].lower() == "or" else r" \land ", text)


def _words(text: str) -> str | None:
    """A text of words only, in lower case, without an article before it or punctuation."""
    text = _ARTICLE.sub("", text)
    if OPEN not in text or re.sub(rf"{WORD}|[\s.,;:!?()'-]", "", text):
        return None
    return " ".join(re.findall(WORD, text)).lower()


def _flat(text: str) -> str:
    """Without the marks of words, and white space only where it parts digits or a command from a letter."""
    text = text.replace(OPEN, "").replace(CLOSE, "")
    return re.sub(
        r"(?<!\d) (?!\d)|(?<=\d) (?!\d)|(?<!\d) (?=\d)", "", re.sub(r"(\\[A-Za-z]+) (?=[A-Za-z])", r"\1{}", text)
    )


def _outside_brackets(text: str) -> list[str]:
    """The parts of a text that no bracket encloses, with the enclosed ones as the odd items between them."""
    parts, depth, start = [], 0, 0
    for found in _BRACKET.finditer(text):
        opens = found[0] in ("(", "[", r"\{")
        if opens and depth == 0:
            parts.append(text[start : found.start()])
            start = found.start()
        depth = max(0, depth + (1 if opens else -1))
        if not opens and depth == 0:
            parts.append(text[start : found.end()])
            start = found.end()
    return [*parts, text[start:]]


def _grouped(text: str) -> str:
    """Without what parts the digits of one number in groups of three."""
    text = _SPACED_GROUPS.sub(lambda group: group[1] + group[2].replace(" ", ""), text, count=1)
    parts = _outside_brackets(text)
    if any("," in _COMMA_GROUPS.sub("", part) for part in parts[::2]):
        return text
    parts[::2] = [_COMMA_GROUPS.sub(lambda group: group[0].replace(",", ""), part) for part in parts[::2]]
    return "".join(parts)


def _based(text: str) -> tuple[str, int] | None:
    """The digits in base ten of a number written with another base, and that base."""
    found = _BASED.fullmatch(text)
    if found is None:
        return None
    digits, written, name = found.groups()[:3] if found[1] else found.groups()[3:]
    base = int(written) if written else _BASES.get(name, 0)
    try:
        return str(int(digits, base)), base
    except ValueError:
        return None


def _measured(text: str) -> tuple[str, Unit | None]:
    """Value and unit."""
    text = _PER_CENT.sub(f"{OPEN}percent{CLOSE}", text)
    unit = None
    currency = _CURRENCY.match(text)
    if currency:
        sign, *symbols = currency.groups()
        unit = named(_CURRENCIES[next(symbol for symbol in symbols if symbol)])
        text = sign + text[currency.end() :]
    behind_it = None if currency else _CURRENCY_BEHIND.search(text)
    if behind_it:
        unit = named(_CURRENCIES[behind_it[1] or behind_it[2]])
        text = text[: behind_it.start()]
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


def _fractions(text: str) -> str:
    """With mixed numbers and repeating decimals as fractions."""
    text = _MIXED.sub(_mixed, text)
    text = _DOTS.sub(lambda dots: _repeating(dots[1], dots[2], dots[3] + dots[4] + dots[5]), text)
    text = _BAR.sub(lambda bar: _repeating(bar[1], bar[2], bar[3] or bar[4]), text)
    cycle = _CYCLE.fullmatch(text)
    if cycle:
        return cycle[1] + _repeating(cycle[2], cycle[3], cycle[4])
    return _AND_SO_ON.sub(_and_so_on, text)


def _mixed(found: re.Match[str]) -> str:
    whole, numerator, denominator = found.groups()
    if not int(numerator) < int(denominator):
        return found[0]
    return rf"({whole}+\frac{{{numerator}}}{{{denominator}}})"


def _repeating(whole: str, decimals: str, block: str) -> str:
    """The fraction that whole.decimals(block)(block)... is.

    >>> _repeating("0", "1", "6")
    '\\\\frac{15}{90}'
    """
    start = int(whole + decimals or "0")
    numerator = int(whole + decimals + block) - start
    return rf"\frac{{{numerator}}}{{{'9' * len(block)}{'0' * len(decimals)}}}"


def _and_so_on(found: re.Match[str]) -> str:
    """The same for decimals that stop with dots, where they show what repeats: three times, or twice if it is long.

    Not for zeros and nines: 12.999... is what a computer prints for something near 13.
    """
    whole, decimals = found.groups()
    for length in range(1, len(decimals) // 2 + 1):
        block = decimals[-length:]
        shown = decimals
        times = 0
        while shown.endswith(block):
            shown, times = shown[: -len(block)], times + 1
        if times >= (3 if length == 1 else 2) and set(block) not in ({"0"}, {"9"}):
            return _repeating(whole, shown, block)
    return found[0]
