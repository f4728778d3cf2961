"""Decides which rows are used: each rule is a function that returns why a row is dropped, or None.

    rules = [not_an_integer, Duplicates()]
    kept_or_dropped = [sifted(row, rules) for row in rows]

Promises
- A row that is dropped becomes a `Dropped` with the first reason, so that reasons add up.
- A rule sees only rows that all rules before it have passed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from recipes.rstar2.parts.preparation.rows import Conversation, Dropped, Problem, Row, fingerprint, words

Rule = Callable[[Row], Dropped | None]

LONGEST_PROBLEM = 8192  # characters: about the 2,048 tokens that the release allows a prompt
LONGEST_CONVERSATION = 1 << 17  # characters: about 32 K tokens
MOST_DIGITS = 18  # the most that an answer may have: 64 bits hold it
LONGEST_INTEGER = 1000  # characters; Python itself reads none of more than 4,300 digits


def sifted(row: Row | Dropped, rules: Sequence[Rule]) -> Row | Dropped:
    """Returns the row, or why the first rule that refuses it drops it. What was dropped before stays so."""
    if isinstance(row, Dropped):
        return row
    refusals = (rule(row) for rule in rules)
    return next((dropped for dropped in refusals if dropped is not None), row)


# Answers.

_INTEGER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.0*)?")
_NO_ANSWER = re.compile(
    r"(?:n/?a|none|not found|unknown|null|undefined|not? (?:enough|sufficient) (?:information|data)|"
    r"(?:insufficient|not given).*|.*cannot be determined.*|.*does not exist|no (?:real )?solutions?|no answer)\.?",
    re.IGNORECASE,
)
_BRACKETS = re.compile(r"[(\[{][^()\[\]{}]*[)\]}]")
_SEVERAL = re.compile(r"\b(?:or|and)\b|;|\\text\{\s*(?:or|and)\s*\}|\\pm|\\mp|±", re.IGNORECASE)


def integer_of(answer: str) -> int | None:
    r"""Returns the integer that an answer writes, if it is one.

    >>> [integer_of(text) for text in ("1,200", "$-7$", "\\boxed{12}", "43.0", "1/2", "1,2", "12 or 13")]
    [1200, -7, 12, 43, None, None, None]
    """
    if len(answer) > LONGEST_INTEGER:
        return None
    text = _without_spacing(answer).strip().strip("$").strip()
    boxed = re.fullmatch(r"\\(?:boxed|fbox)\s*\{([^{}]*)\}", text)
    text = (boxed[1] if boxed else text).removeprefix("\\$").strip()
    if not _INTEGER.fullmatch(text):
        return None
    return int(text.partition(".")[0].replace(",", ""))


def _without_spacing(answer: str) -> str:
    """Returns a text with LaTeX's thousands separators and minus signs as plain characters."""
    return re.sub(r"\\!\s*", "", answer.replace("{,}", ",").replace("−", "-"))


def _outside_brackets(text: str) -> str:
    """Returns what stands in no brackets: a point (1, 2) and a set \\{1, 2\\} are one answer."""
    shorter = _BRACKETS.sub("", text)
    return text if shorter == text else _outside_brackets(shorter)


def canonical(answer: str) -> str:
    """Returns an integer plainly, another answer as it is.

    >>> canonical(" 1,200 "), canonical("x^2")
    ('1200', 'x^2')
    """
    number = integer_of(answer)
    return answer.strip() if number is None else str(number)


def no_answer(row: Row) -> Dropped | None:
    """Drops a problem whose reference is empty, or says that there is none ("not enough information")."""
    assert isinstance(row, Problem)
    if row.answer and not _NO_ANSWER.fullmatch(row.answer):
        return None
    return Dropped(reason="no_answer", detail=row.answer)


def several_answers(row: Row) -> Dropped | None:
    """Drops a problem whose reference has more than one answer: "12 or 13", "1, 2, 3", "\\pm 2"."""
    assert isinstance(row, Problem)
    answer = _without_spacing(row.answer)
    if _SEVERAL.search(answer) or "," in re.sub(r"(?<=\d),(?=\d{3}\b)", "", _outside_brackets(answer)):
        return Dropped(reason="several_answers", detail=row.answer)
    return None


def not_an_integer(row: Row) -> Dropped | None:
    assert isinstance(row, Problem)
    return Dropped(reason="not_integer", detail=row.answer) if integer_of(row.answer) is None else None


def huge_answer(row: Row) -> Dropped | None:
    assert isinstance(row, Problem)
    number = integer_of(row.answer)
    huge = number is not None and abs(number) >= 10**MOST_DIGITS
    return Dropped(reason="huge_answer", detail=row.answer) if huge else None


# Questions.

_PROOF = re.compile(r"\b(?:prove|proof|show that|disprove|justify|demonstrate that|verify that)\b", re.IGNORECASE)
_ASKS = re.compile(r"\?|\b(?:find|compute|calculate|determine|evaluate|what|how many|how much)\b", re.IGNORECASE)
_DRAWING = re.compile(r"\[asy\].*?\[/asy\]|\\begin\{(asy|tikzpicture)\}.*?\\end\{\1\}", re.DOTALL)
_OPTIONS = re.compile(
    r"(?<!\w)\(\s*A\s*\).*(?<!\w)\(\s*B\s*\).*(?<!\w)\(\s*C\s*\)|^\s*A[.):].*^\s*B[.):].*^\s*C[.):]", re.DOTALL | re.M
)
_BEGINS = r"(?:^|[.?!:;]\s)\s*"  # a sentence or a line
_PARTS = re.compile(rf"{_BEGINS}\((?:a|i)\)\s.*{_BEGINS}\((?:b|ii)\)\s", re.DOTALL | re.M)
_ANSWER_IS_LETTER = re.compile(r"(?:\\text\{)?\(?[A-E]\)?\}?")
_CHINESE = re.compile("[\u3040-\u30ff\u3400-\u9fff]")


def proof(row: Row) -> Dropped | None:
    """Drops a row that asks for a proof and for nothing that has a value."""
    text = row.text
    return Dropped(reason="proof") if _PROOF.search(text) and not _ASKS.search(text) else None


def multiple_choice(row: Row) -> Dropped | None:
    """Drops a problem with options A, B, C, or whose answer is the letter of one. A drawing's code does not count."""
    assert isinstance(row, Problem)
    choice = _OPTIONS.search(_DRAWING.sub("", row.text)) or _ANSWER_IS_LETTER.fullmatch(row.answer)
    return Dropped(reason="multiple_choice") if choice else None


def several_questions(row: Row) -> Dropped | None:
    """Drops a row with parts (a), (b) or (i), (ii), of which the reference answers at most one."""
    return Dropped(reason="several_questions") if _PARTS.search(row.text) else None


def not_english(row: Row) -> Dropped | None:
    return Dropped(reason="not_english") if _CHINESE.search(row.text) else None


def not_text(row: Row) -> Dropped | None:
    """Drops a row with half a surrogate pair, which no file can hold."""
    text = row.identity
    return Dropped(reason="not_text") if text != text.encode(errors="replace").decode() else None


def no_question(row: Row) -> Dropped | None:
    return None if row.text.strip() else Dropped(reason="no_question")


def over_long(row: Row) -> Dropped | None:
    most = LONGEST_CONVERSATION if isinstance(row, Conversation) else LONGEST_PROBLEM
    return Dropped(reason="over_long", detail=f"{row.chars} characters") if row.chars > most else None


CHECKABLE: Sequence[Rule] = (over_long, no_answer, proof, multiple_choice, several_answers, several_questions)
"""Rules that drop problems which cannot be graded."""


# Against other rows.


class Duplicates:
    """Drops a row that differs from an earlier one in case and white space alone. 8 bytes a row, and Python's own.

    seen: fingerprints of the rows that stayed.
    """

    def __init__(self, seen: Iterable[int] = ()) -> None:
        self.seen = set(seen)

    def __call__(self, row: Row) -> Dropped | None:
        mark = fingerprint(row.identity)
        if mark in self.seen:
            return Dropped(reason="duplicate")
        self.seen.add(mark)
        return None


class Contamination:
    """Drops a row that shares n words in a row with a row of a test set (n = 8 in the report).

    A row of a test set with fewer than n words matches only a row with exactly these words.

    >>> tests = Contamination(n=3)
    >>> tests.add("Find the area of a square.", name="test-0")
    >>> tests(Problem(id="a", index=0, source="", question="Now find the AREA of it.", answer="1")).against
    'test-0'
    """

    def __init__(self, n: int = 8) -> None:
        self.n = n
        self._names: dict[str, str] = {}  # n words in a row, or a whole shorter row -> the test row that has them

    def __len__(self) -> int:
        return len(self._names)

    def add(self, text: str, *, name: str) -> None:
        """Adds a row of a test set. name: what reports call it."""
        for gram in self._grams(words(text)):
            self._names.setdefault(gram, name)

    def __call__(self, row: Row) -> Dropped | None:
        for gram in self._grams(words(row.text)):
            if gram in self._names:
                return Dropped(reason="contaminated", detail=gram, against=self._names[gram])
        return None

    def _grams(self, terms: Sequence[str]) -> Iterator[str]:
        if 0 < len(terms) < self.n:
            yield " ".join(terms)
        for at in range(len(terms) - self.n + 1):
            yield " ".join(terms[at : at + self.n])


@dataclass(frozen=True, slots=True)
class Agreement:
    """Drops a problem whose reference equals fewer than `least` of a model's answers to it.

    answers: a model's answers by the problem's id, as `recipes/rstar2/filter.py` samples them. If the reference agrees
    with hardly any, it is wrong or the problem too hard.

    >>> rule = Agreement({"a-0": ["12", "1,2", "12.0", None]}, least=2)
    >>> rule(Problem(id="a-0", index=0, source="", question="?", answer="12")) is None
    True
    """

    answers: Mapping[str, Sequence[str | None]]
    least: int

    def __call__(self, row: Row) -> Dropped | None:
        assert isinstance(row, Problem)
        given = self.answers.get(row.id)
        if given is None:
            return Dropped(reason="not_answered", detail="the answers have no such id")
        reference = canonical(row.answer)
        equal = sum(answer is not None and canonical(answer) == reference for answer in given)
        if equal >= self.least:
            return None
        return Dropped(reason="disagree", detail=f"{equal} of {len(given)} answers are {reference}")
