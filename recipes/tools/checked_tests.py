"""Reads hidden tests before a run: what `inside/grading.py` cannot run is refused by its name. Pure."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection
from pathlib import Path

from engine.errors import BadInput
from recipes.tools.inside.workspace import ROOT as WORKSPACE

PYTEST = {"raises", "approx", "mark"}


def checked_tests(path: Path | str, source: str, root: str = "", modules: Collection[str] = ()) -> str:
    """Returns a test file that `inside/grading.py` can run. Raises BadInput for what it has not.

    modules: names of those that the workspace begins with.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise BadInput(f"{path}: line {error.lineno}: {error.msg}") from error
    _check_collected(path, tree)
    for node in ast.walk(tree):
        for name in _imported(node):
            if name in modules and name in sys.stdlib_module_names:
                raise BadInput(f"{path}: {name} is a module of Python, and tests get that one. Fix: rename {name}.py")
        match node:
            case ast.Import(names=names) if any(each.name == "pytest" and each.asname for each in names):
                raise BadInput(f"{path}: pytest must be imported under its own name")
            case ast.ImportFrom(module="pytest", names=names) if any(each.name not in PYTEST for each in names):
                raise BadInput(f"{path}: pytest.{names[0].name} is not there; there is {', '.join(sorted(PYTEST))}")
            case ast.Attribute(value=ast.Name(id="pytest"), attr=name) if name not in PYTEST:
                raise BadInput(f"{path}: pytest.{name} is not there; there is {', '.join(sorted(PYTEST))}")
            case (
                ast.Attribute(value=ast.Attribute(value=ast.Name(id="pytest"), attr="mark"), attr=name)
                | ast.Attribute(value=ast.Name(id="mark"), attr=name)
            ) if name != "parametrize":
                raise BadInput(f"{path}: pytest.mark.{name} is not there; there is parametrize")
            case ast.Constant(value=str(text)) if root and (text == root or text.startswith(f"{root}/")):
                node.value = WORKSPACE + text.removeprefix(root)
    return ast.unparse(tree)


def _check_collected(path: Path | str, tree: ast.Module) -> None:
    """Raises BadInput for tests that would not be run, and for a file without any."""
    tests = 0
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name, body=body) if any(
                getattr(each, "name", "").startswith("test") for each in body
            ):
                raise BadInput(f"{path}: the tests of the class {name} would not run. Fix: make them functions")
            case ast.AsyncFunctionDef(name=name) if _is_test(node):
                raise BadInput(f"{path}: {name} is async and would not run. Fix: make it a def")
            case ast.FunctionDef(name=name, args=given) if _is_test(node):
                known = {each for mark in node.decorator_list for each in _parametrized(mark)}
                every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
                unknown = [argument.arg for argument in every if argument.arg not in known]
                if unknown:
                    raise BadInput(f"{path}: {name} wants the fixture {unknown[0]!r}, and there are none")
                tests += 1
    if not tests:
        raise BadInput(f"{path} has no function test_*. Fix: write tests as functions with assert")


def _is_test(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")


def _imported(node: ast.AST) -> list[str]:
    """Returns the first parts of the names of the modules that a statement imports."""
    match node:
        case ast.Import(names=names):
            return [each.name.partition(".")[0] for each in names]
        case ast.ImportFrom(module=str(name)):
            return [name.partition(".")[0]]
    return []


def _parametrized(mark: ast.expr) -> list[str]:
    """Returns the names that a decorator gives values to."""
    match mark:
        case ast.Call(func=ast.Attribute(attr="parametrize"), args=[ast.Constant(value=str(names)), *_]):
            return [name.strip() for name in names.split(",")]
        case ast.Call(func=ast.Attribute(attr="parametrize"), args=[ast.List(elts=names) | ast.Tuple(elts=names), *_]):
            return [name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str)]
    return []
