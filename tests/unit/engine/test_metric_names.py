"""Each name of a metric is in engine/metric_names.py, and spelt nowhere else but on the page."""

import ast
import json
import re
from pathlib import Path

import pytest

from engine import metric_names as metric
from tests.support import metric_tables
from tests.support.paths import ROOT

CONSTANTS = {key: value for key, value in vars(metric).items() if key.isupper() and isinstance(value, str)}
BY_SOURCE = [metric.of_source(name, "*") for name in metric.BY_SOURCE]
NAMES = [*CONSTANTS.values(), *BY_SOURCE]
SOURCES = [path for folder in ("engine", "recipes", "bench") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGE = sorted((ROOT / "engine" / "view" / "static").rglob("*.js"))
RUNS = sorted((ROOT / "tests" / "unit" / "engine" / "diagnosis" / "recorded").glob("*.jsonl"))
OPEN = (metric.LEARNER, metric.GROUPS_DROPPED)  # of these families any name may be in use


def is_known(name: str) -> bool:
    return any(name == known or metric.part_of(known, name) for known in NAMES if known not in OPEN)


def test_a_constant_is_called_as_its_metric():
    names = {key: value for key, value in CONSTANTS.items() if "*" not in value}
    assert len(names) > 80
    assert {key: value for key, value in names.items() if key != value.upper().replace("/", "_")} == {}
    assert len(set(NAMES)) == len(NAMES)


def test_each_name_is_in_the_tables():
    tables = metric_tables.tables()
    assert [name for name in NAMES if f"`{name}`" not in tables] == []


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_names_that_a_run_has_written_are_known(path: Path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    written = {name for row in rows if "step" in row for name in row} - {"step"}
    assert len(written) > 50
    assert [name for name in sorted(written) if not is_known(name)] == []


def test_no_source_spells_a_name_itself():
    """Docstrings may. `reward` alone is a word of other things too."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {text}"
        for path in SOURCES
        if path != metric_tables.NAMES
        for text, line in strings(ast.parse(path.read_text()))
        if text in NAMES and "/" in text
    ]
    assert wrong == []


def strings(tree: ast.Module):
    """Yields the strings of a module but for its docstrings, with * for what an f-string puts in."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.value, node.lineno
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "*" for part in node.values]
            yield "".join(parts), node.lineno


@pytest.mark.parametrize("path", PAGE, ids=lambda path: path.stem)
def test_names_that_the_page_asks_for_are_known(path: Path):
    """It may ask for a name, for a template of names, or for all names that begin so."""
    firsts = {name.partition("/")[0] for name in NAMES if "/" in name}
    texts = re.findall(r"""["'`]([a-z_]+/[^"'`\s]*)["'`]""", path.read_text())
    asked = [re.sub(r"\$\{.*?\}", "*", text) for text in texts if text.partition("/")[0] in firsts]
    assert [text for text in asked if not (is_known(text) or begins_or_makes_one(text))] == []


def begins_or_makes_one(text: str) -> bool:
    pattern = re.escape(text).replace(r"\*", ".+") + (".+" if text.endswith("/") else "")
    return any(re.fullmatch(pattern, name) for name in NAMES if name not in OPEN)


def test_a_family_and_its_members():
    assert metric.part_of(metric.STAGE_BUSY_S, metric.member(metric.STAGE_BUSY_S, "admit")) == "admit"
    for name in ("stage//busy_s", "stage/busy_s", "stage/admit/queue", ""):
        assert metric.part_of(metric.STAGE_BUSY_S, name) is None
