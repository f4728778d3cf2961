"""Names of our modules where no import follows them: in strings (`python -m ...`), comments, pages and settings."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from functools import cache
from pathlib import Path

from tests.test_layers import HEAVY, INSIDE_THE_JAIL, MAY_IMPORT, NEVER

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("engine", "sandbox", "algo", "recipes", "bench")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
PAGES = [*ROOT.glob("*.md"), *(path for package in PACKAGES for path in (ROOT / package).rglob("*.md"))]
DOTTED = re.compile(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})(?:\.[A-Za-z_]\w*)+")


def missing(text: str) -> list[str]:
    """Returns the dotted names in a text that are neither a module of ours nor a name in one.

    `sandbox.slots` is an option of recipes; so names below `sandbox` count only where a module begins them.
    """
    return [name for name in DOTTED.findall(text) if not is_there(name.split("."))]


def is_there(parts: list[str]) -> bool:
    folder = ROOT / parts[0]
    for number, part in enumerate(parts[1:], 2):
        if (folder / f"{part}.py").is_file():
            return number == len(parts) or parts[number] in names_in(folder / f"{part}.py")
        if not (folder / part).is_dir():
            is_option = parts[0] == "sandbox" and number == 2
            return is_option or part in names_in(folder / "__init__.py") or part == "__main__"
        folder /= part
    return True


@cache
def names_in(path: Path) -> set[str]:
    """What a module defines or imports, and the attributes of its classes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name)
    return found


def test_modules_that_strings_and_comments_name_are_there():
    wrong = []
    for path in SOURCES:
        text = path.read_text()
        if not missing(text):
            continue
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                wrong += [f"{path.relative_to(ROOT)}:{token.start[0]} {name}" for name in missing(token.string)]
    assert wrong == []


def test_modules_that_pages_name_are_there():
    assert [f"{path.relative_to(ROOT)} {name}" for path in PAGES for name in missing(path.read_text())] == []


def test_a_module_that_is_not_there_is_noticed():
    assert missing("`engine.run.identity.Identity`, python -m engine.commands.view, engine/run.py") == []
    assert missing("`engine.run.identity.Nobody` python -m engine.console.rollouts") == [
        *("engine.run.identity.Nobody", "engine.console.rollouts")
    ]


def test_the_rules_of_layers_are_about_folders_that_are_there():
    modules = [module for allowed in MAY_IMPORT.values() for module in allowed] + list(NEVER.values())
    places = [*MAY_IMPORT, *NEVER, *INSIDE_THE_JAIL, *(path for paths in HEAVY.values() for path in paths)]
    places += [module.replace(".", "/") for module in modules]
    assert [place for place in places if not (ROOT / place).exists() and not (ROOT / f"{place}.py").is_file()] == []


def test_files_that_ship_with_a_package_are_there():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    shipped = settings["setuptools"]["package-data"]
    empty = [
        f"{package}: {pattern}"
        for package, patterns in shipped.items()
        for pattern in patterns
        if not list((ROOT / package.replace(".", "/")).glob(pattern))
    ]
    assert empty == []
    ignored = settings["ruff"]["lint"]["per-file-ignores"]
    assert [pattern for pattern in ignored if not list(ROOT.glob(pattern))] == []
