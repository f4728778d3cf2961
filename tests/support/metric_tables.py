"""Writes the tables of metrics in recipes/runs.md: `python -m tests.support.metric_tables`, or `make format`.

They hold each name of engine/metric_names.py with the text below it; a comment there begins a new table.
"""

from __future__ import annotations

from itertools import groupby

from engine.metric_names import BY_SOURCE
from engine.telemetry.meanings import documented
from tests.support.paths import ROOT

PAGE = ROOT / "recipes" / "runs.md"
NAMES = ROOT / "engine" / "metric_names.py"
BEGIN, END = "<!-- made from engine/metric_names.py by `make format` -->\n", "<!-- until here -->\n"


def tables() -> str:
    """Returns the tables."""
    lines: list[str] = []
    for section, entries in groupby(documented(), key=lambda entry: entry.section):
        lines += ["", f"| {section.lower()} | meaning |", "|---|---|"]
        lines += [f"| {_cell(entry.name)} | {entry.text} |" for entry in entries]
    return "\n".join(lines) + "\n\n"


def _cell(name: str) -> str:
    return f"`{name}`, `{name}/*`" if name in BY_SOURCE else f"`{name}`"


def page() -> str:
    """Returns the page with its tables made anew."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + tables() + END + after


if __name__ == "__main__":
    PAGE.write_text(page())
