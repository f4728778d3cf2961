r"""Tells words from mathematics: `marked` puts each word between OPEN and CLOSE (`algo.reward.maths.unit`)."""

from __future__ import annotations

import re

from algo.reward.maths.unit import CLOSE, OPEN, WORD

# A text command with its content: words, or mathematics of its own.
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
# Runs of two or three letters that are words even outside of \text; other runs are products of variables.
_SHORT = """
or and not is the to of no yes odd even if cm km kg mg mm ft lb lbs oz sec min hr hrs day mph kmh kph deg rad sq cu ml
gal yd cup pie way men man usd eur are for dne ans all any two one six ten mod per pct boy egg toy bag box car pen hat
cat dog bus rs
"""
_SHORT_WORDS = frozenset(_SHORT.split())
# A short run of letters behind a word is a word too ("years old"), unless that word joins or introduces formulas.
_RUN_BEHIND = re.compile(
    rf"(?<={CLOSE} )(?<!{OPEN}and{CLOSE} )(?<!{OPEN}or{CLOSE} )(?<!{OPEN}is{CLOSE} )(?<!{OPEN}are{CLOSE} )"
    rf"([A-Za-z]{{2,3}}|a)(?= |\Z|{OPEN})"
)
# The functions min and sec, which are units behind a number, a word or "per".
_MIN_OR_SEC = re.compile(rf"(?<=[\d}}/{CLOSE}])\s?\\(min|sec)\s?(?=\Z|[.,;/)]|{OPEN})|(?<=/)\\(sec) ?(?=\^)")
# Short words that are products of variables: `\pi hr^2`, `\frac{mg}{k}`, but not `2 hr`.
_PRODUCT = re.compile(r"(\A|(?<!\\)\\[A-Za-z]+ |[{}(+*=-])(mg|hr|rs)(?![A-Za-z])")
_MODULO = re.compile(rf"\(\s*{OPEN}mod{CLOSE}\s*(\d+)\s*\)")
_RATIO = re.compile(rf"\A(\d{{1,50}})\s?{OPEN}to{CLOSE}\s?(\d{{1,50}})\Z")
_AND = re.compile(rf"\s*,?\s*{OPEN}(and|or|And|Or|AND|OR){CLOSE}\s*")
_ARTICLE = re.compile(rf"\A(?:an?|{OPEN}(?:an?|the){CLOSE})\s+(?={OPEN})", re.IGNORECASE)


def marked(text: str) -> str:
    r"""Returns a text with its words marked: those in \text, and runs of letters that are not mathematics."""
    for _ in range(4):
        inner = _TEXT.sub(_text_content, text)
        if inner == text:
            break
        text = inner
    text = _PRODUCT.sub(lambda product: product[1] + " ".join(product[2]), text)
    text = _RUN.sub(_run, text)
    text = re.sub(r"\s+", " ", text)
    text = _MIN_OR_SEC.sub(lambda unit: f" {OPEN}{unit[1] or unit[2]}{CLOSE} ", text)
    text = _MODULO.sub(r"\\pmod{\1}", text)
    for _ in range(3):
        text = _RUN_BEHIND.sub(rf"{OPEN}\1{CLOSE}", text)
    return _RATIO.sub(r"\1:\2", re.sub(r"\s+", " ", text).strip())


def _text_content(command: re.Match[str]) -> str:
    plain, font, symbols, roman = command.groups()
    content = plain if plain is not None else symbols if symbols is not None else roman
    name = content.strip()
    if name in _FUNCTIONS:
        return rf"\{name} "
    if font and len(name) == 1 and (font != "rm" or name in "eid"):
        return name
    return " " + re.sub(r"(?<![\\A-Za-z])[^\W\d_]+(?:['-][^\W\d_]+)*", lambda run: OPEN + run[0] + CLOSE, content) + " "


def _run(match: re.Match[str]) -> str:
    run = match[0]
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


def listed(text: str) -> str:
    """Returns a text with "and" and "or" between mathematics as symbols."""
    if words_of(text) is not None:
        return text
    return _AND.sub(lambda word: r" \lor " if word[1].lower() == "or" else r" \land ", text)


def words_of(text: str) -> str | None:
    """Returns a text of nothing but words in lower case, without its article and punctuation; None for other texts."""
    text = _ARTICLE.sub("", text)
    if OPEN not in text or re.sub(rf"{WORD}|[\s.,;:!?()'-]", "", text):
        return None
    return " ".join(re.findall(WORD, text)).lower()


def unmarked(text: str) -> str:
    """Returns a text without the marks, and with white space only between digits or after a command before a letter."""
    text = text.replace(OPEN, "").replace(CLOSE, "")
    return re.sub(
        r"(?<!\d) (?!\d)|(?<=\d) (?!\d)|(?<!\d) (?=\d)", "", re.sub(r"(\\[A-Za-z]+) (?=[A-Za-z])", r"\1{}", text)
    )
