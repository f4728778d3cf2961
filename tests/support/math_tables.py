"""Tables of answers judged by hand: lines of fields parted by tabs, comments behind #."""

from typing import NamedTuple

from tests.support.paths import GOLDEN


class Pair(NamedTuple):
    answer: str
    reference: str
    right: bool
    decided: str
    """By "text" or by the "grader"."""


def pairs(name: str) -> list[Pair]:
    """The rows of a table in this folder; ⏎ is a line break."""
    rows = []
    for line in (GOLDEN / name).read_text().splitlines():
        if line and not line.startswith("#"):
            answer, reference, verdict, *decided = line.split("\t")
            assert verdict in ("right", "wrong"), line
            rows.append(Pair(answer.replace("⏎", "\n"), reference, verdict == "right", *(decided or ["text"])))
    return rows
