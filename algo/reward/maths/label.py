r"""Takes off what only names an answer: "The answer is", "Area =", the letter of an option "(A)"."""

from __future__ import annotations

import re

from algo.reward.maths.spelling import END, unfenced
from algo.reward.maths.unit import CLOSE, OPEN, WORD, denies

_LABEL = re.compile(
    rf"\A\s*(?:{OPEN}(?:the|so|thus|hence|therefore|our|my|final|correct|answer|answers|ans|result|solution|solutions|value"
    rf"|is|are|equals|we|get|that|it|there|option|choice){CLOSE}[\s,]*)+[:=]?\s*(?=[^\s.,!?])",
    re.IGNORECASE,
)
# One part of the name of a number, such as `\text{Area of }\triangle ABC`.
_NAME_PART = re.compile(rf"\s*(?:{WORD}|\\(?:triangle|angle){END}|[A-Z]{{2,4}}{END}|[A-Za-z]{END})")
_NAME_END = re.compile(r"\s*[:=]\s*(?=\S)")
_IS = frozenset(("is", "are", "was", "equal", "equals"))
# Words that change a number beside them, but not within its name: "the remainder is 3".
_OF_A_NAME = _IS | frozenset(("remainder", "base", "power", "factorial", "root", "score", "pair", "pairs", "with"))
OPTION = re.compile(rf"\(?\s*{OPEN}?([A-Z]){CLOSE}?\s*\)?")
_OPTION_LABEL = re.compile(
    rf"\s*(?:\(\s*{OPEN}?([A-J]){CLOSE}?\s*\)\s*|{OPEN}?([A-J]){CLOSE}?\s*[.:)]\s+)(?=[^\s,;^_/+=-])"
    rf"|\s*\(\s*{OPEN}([A-J]){CLOSE}\s*\)\s*(?=[^\s,;])"
)
# A second option behind the first: the answer is not just that one. But "both (A) and (B)" may be an option itself.
_OTHER_OPTION = re.compile(
    rf"(?<![^\s,;{OPEN}])(?:\(\s*{OPEN}?[A-J]{CLOSE}?\s*\)|[A-J]{CLOSE}?\s?[.:)]\s)"
    rf"|(?:{OPEN}(?:or|and){CLOSE}|[,;])\s*{OPEN}?[A-J]{CLOSE}?(?![A-Za-z])"
)
_SEVERAL_OPTIONS = re.compile(rf"\s*{OPEN}(?:both|neither|none|all|only){CLOSE}", re.IGNORECASE)
_TAKEN_BACK = re.compile(rf"\s*{OPEN}(?:is|are|was|isn't|or|and|nor){CLOSE}", re.IGNORECASE)


def without_label(text: str) -> tuple[str, str | None, bool]:
    """Returns an answer without its label, the letter of its option if it has one, and whether it shows only one."""
    text = _LABEL.sub("", text, count=1)
    option = _OPTION_LABEL.match(text)
    if option is None:
        for _ in range(3):
            text = text[_name_end(text) :]
        option = _OPTION_LABEL.match(text)
    if option is None or OPTION.fullmatch(text[option.end() :]):
        return unfenced(text), None, True
    rest = text[option.end() :]
    several = _OTHER_OPTION.search(rest) and not _SEVERAL_OPTIONS.match(rest)
    if several or _TAKEN_BACK.match(rest):
        return unfenced(text), None, False
    return unfenced(rest), option[1] or option[2] or option[3], True


def _name_end(text: str) -> int:
    """Returns where the name before an answer ends ("Area =", "The number of ways is"); 0 if there is none."""
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
    """Returns the words of the name that begins at `start`, up to the first "is", and where they end."""
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
    """Returns whether words only name a number, and neither change it nor take it back as "at least" does."""
    for before, word in zip(["", *words], words, strict=False):
        superlative = word in ("least", "most") and before != "at"
        if denies(word) and word not in _OF_A_NAME and not superlative:
            return False
    return True


def without_name_behind(text: str) -> str:
    r"""Returns an answer without a name behind it: `24 = \text{Area}`."""
    value, equals, behind = text.rpartition("=")
    if not equals or not behind.lstrip().startswith(OPEN) or not re.search(r"\d", value):
        return text
    words, end = _name(behind, 0)
    return value.rstrip() if end == len(behind.rstrip()) and _names(words) else text
