"""Writes the tables of metrics in recipes/runs.md: `python -m tests.support.metric_tables`, or `make format`.

They hold each name of engine/metric_names.py with the text below it; a comment there begins a new table.
"""

from __future__ import annotations

import re

from engine.metric_names import BY_SOURCE
from tests.support.paths import ROOT

PAGE = ROOT / "recipes" / "runs.md"
NAMES = ROOT / "engine" / "metric_names.py"
BEGIN, END = "<!-- made from engine/metric_names.py by `make format` -->\n", "<!-- until here -->\n"
_ENTRY = re.compile(r'^# (?P<title>.+)$|^[A-Z0-9_]+ = "(?P<name>.+)"\n"""(?P<meaning>[^"]+)"""$', re.MULTILINE)


def tables() -> str:
    """Returns the tables."""
    lines: list[str] = []
    for entry in _ENTRY.finditer(NAMES.read_text()):
        if entry["title"]:
            lines += ["", f"| {entry['title'].lower()} | meaning |", "|---|---|"]
        else:
            lines.append(f"| {_cell(entry['name'])} | {' '.join(entry['meaning'].split())} |")
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
