"""Writes engine/api.md, the index of what one may import: `python -m tests.support.api_index`, or `make format`.

The index has the whole of the modules below, and each name that a recipe or an example of a page imports. Their
descriptions are the first sentences of their docstrings.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INDEX = ROOT / "engine" / "api.md"
PACKAGES = ("engine", "algo", "sandbox")
WHOLE = ("engine.recipe", "engine.types", "engine.ports", "engine.contracts", "algo.contracts")
YIELDED = (("engine.assembly.training", "Training"), ("engine.assembly.serving", "Serving"), ("sandbox", "Session"))
WITH_METHODS = ("Training", "Serving", "Sandbox", "Session", "RecordedRun")
EXAMPLES = (
    "README.md",
    "algo/README.md",
    "sandbox/README.md",
    *(f"recipes/{page.name}" for page in sorted((ROOT / "recipes").glob("*.md"))),
)
HEAD = """# Index

What you may import, with the first sentence of its docstring: the Protocols and types that your parts meet, and each
name that a recipe or an example of these pages imports. Other names are the engine's own and may change. `make format`
writes this page from the sources.
"""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def index() -> str:
    """Returns the page."""
    names = defaultdict(set)
    for module, name in (*_imported(), *_defined(), *YIELDED):
        home, definition = _home(module, name)
        if (text := _sentence(definition)) is not None:
            names[home].add((name, text))
            if name in WITH_METHODS:
                names[home] |= {(f"{name}.{method}", sentence) for method, sentence in _methods(definition)}
    parts = [HEAD]
    for module in sorted(names):
        path = module.replace(".", "/") + ".py"
        rows = [f"| `{name}` | {text} |" for name, text in sorted(names[module])]
        parts.append("\n".join([f"## [{module}](../{path})\n", "| name | what it is |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _imported() -> Iterator[tuple[str, str]]:
    """Yields the names of ours that recipes and the examples of pages import."""
    sources = [path.read_text() for path in sorted((ROOT / "recipes").glob("*.py"))]
    sources += [path.read_text() for folder in ("agents", "environments") for path in _files(f"recipes/{folder}")]
    for page in EXAMPLES:
        sources += re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
                yield from ((node.module, alias.name) for alias in node.names)


def _files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _defined() -> Iterator[tuple[str, str]]:
    """Yields the public names of the modules that are listed whole."""
    for module in WHOLE:
        for node in _tree(module).body:
            if isinstance(node, Definition) and not node.name.startswith("_"):
                yield module, node.name


def _home(module: str, name: str) -> tuple[str, Definition | None]:
    """Returns the module that defines a name, and its definition if it has one."""
    tree = _tree(module)
    for node in tree.body:
        if isinstance(node, Definition) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return _home(node.module, name)
    return module, None


def _tree(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def _methods(definition: Definition | None) -> Iterator[tuple[str, str]]:
    assert isinstance(definition, ast.ClassDef)
    for node in definition.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            sentence = _sentence(node)
            if sentence is not None:
                yield node.name, sentence


def _sentence(definition: Definition | None) -> str | None:
    """Returns the first sentence of a docstring, as a cell of a table."""
    text = ast.get_docstring(definition) if definition is not None else None
    if not text:
        return None
    first = re.split(r"(?<=\.)\s(?=[A-Z`])", " ".join(text.partition("\n\n")[0].split()), maxsplit=1)[0]
    return first.rstrip(":.").replace("|", "\\|") + "."


if __name__ == "__main__":
    INDEX.write_text(index())
