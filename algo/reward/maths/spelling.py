r"""Spells a text in LaTeX's characters, with one command for each meaning and without what only changes its look.

Digits that white space or a command for it separates are never joined here, except those that LaTeX groups by `{,}`.
"""

from __future__ import annotations

import re
import unicodedata

from algo.reward.maths.unit import CLOSE, OPEN

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
END = r"(?![A-Za-z])"  # the end of a command's name
_LOOK = re.compile(
    rf"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits|bf|it|sf|tt|em){END}\.?"
    rf"|\\(?:boxed|fbox|underline|underbrace|boldsymbol|bm|pmb|mathnormal|ensuremath){END}"
    r"|\\(?:color|textcolor)\s*\{[^{}]*\}"
)
_SPACE = rf"(?<!\\)\\(?:[,;:> \n]|(?:quad|qquad|thinspace|enspace|medspace|thickspace|space){END})|~"
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r",\s*\\!\s*|\{\s*,\s*\}", "{,}"),  # groups of digits, before the spaces go
        (rf"\{{([^{{}}]*)\\choose{END}([^{{}}]*)\}}", r"\\binom{\1}{\2}"),
        (rf"(?<!\\)\\!|(?<!\\)\\/|\\negthinspace{END}", ""),
        (_SPACE, " "),
        (rf"\\(?:ldots|dots|cdots|dotsc|dotsb|textellipsis){END}|\.{{3,}}", r"\\ldots "),
        (rf"\\[dtc]frac{END}", r"\\frac "),
        (rf"\\[dt]binom{END}", r"\\binom "),
        (rf"\\degree{END}|\^\s*\{{\s*\\circ\s*\}}|\^\s*\\circ{END}", r"^\\circ "),
        (rf"\\(?:leqslant|leqq|leq){END}|<=", r"\\le "),
        (rf"\\(?:geqslant|geqq|geq){END}|>=", r"\\ge "),
        (rf"\\ne{END}|!=|\\not\s*=", r"\\neq "),
        (rf"\\lt{END}", "<"),
        (rf"\\gt{END}", ">"),
        (rf"==|\\equiv{END}|\\colon\s*=|:=", "="),
        (rf"\\varnothing{END}|\\\{{\s*\\\}}", r"\\emptyset "),
        (rf"\\lbrace{END}", r"\\{"),
        (rf"\\rbrace{END}", r"\\}"),
        (rf"\\[lr]?vert{END}", "|"),
        (rf"\\backslash{END}", r"\\setminus "),
        (rf"\\mod{END}", r"\\bmod "),
        (r"\\pmod\s*(\d+)|\(\s*\\bmod\s*(\d+)\s*\)", r"\\pmod{\1\2}"),
        (r"\*\*", "^"),
        (rf"\\ast{END}|\*", r"\\cdot "),
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
_BRACED_GROUPS = re.compile(r"(?<![\d.}])[1-9]\d{0,2}(?:\{,\}\d{3})+(?![\d{])")
_DECIMAL_COMMA = re.compile(r"(?<![\d.,}])(\d+)\{,\}(\d+)(?![\d{])")


def cleaned(text: str) -> str:
    """Returns a text in one spelling, without what only changes its look."""
    text = text.translate(_INVISIBLE)
    text = _RAISED.sub(lambda run: "^{" + unicodedata.normalize("NFKC", run[0]).replace("\u2212", "-") + "}", text)
    text = _LOWERED.sub(lambda run: "_{" + unicodedata.normalize("NFKC", run[0]) + "}", text)
    text = _VULGAR_FRACTION.sub(_vulgar_fraction, text)
    text = "".join(map(_plain_character, text.translate(_CHARACTERS))).translate(_CHARACTERS)
    for pattern, replacement in _SPELLINGS[:4]:
        text = pattern.sub(replacement, text)
    text = unfenced(_LOOK.sub(" ", unfenced(text)))
    for pattern, replacement in _SPELLINGS[4:]:
        text = pattern.sub(replacement, text)
    text = _BRACED_GROUPS.sub(lambda group: group[0].replace("{,}", ""), text)
    text = _DECIMAL_COMMA.sub(r"\1.\2", text)
    return _trimmed(re.sub(r"\s+", " ", text))


def _plain_character(character: str) -> str:
    """Returns the plain form of a full-width digit or bold letter; one that stands for several, or ①, stays."""
    if unicodedata.category(character) == "No":
        return character
    plain = unicodedata.normalize("NFKC", character)
    return plain if len(plain) == 1 else character


def _vulgar_fraction(match: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return rf"\frac{{{numerator}}}{{{denominator or 1}}}"


def unfenced(text: str) -> str:
    """Returns a text without fences around all of it, such as `$...$`, and without what ends a sentence or a line."""
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
        text = text[:-1] if text.endswith("\\") else text  # the rest of a space at the end
        text = text[:-1] if text.endswith(".") and not text.endswith("..") else text
    while text.startswith("{") and _closes(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _closes(text: str, start: int) -> int:
    """Returns the position of the brace that closes the one at `start`; -1 if none does."""
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return brace.start()
    return -1
