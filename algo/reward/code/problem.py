"""A problem whose solutions are programs: hidden tests that grade, public ones that may be shown.

Tests travel in `Prompt.answer` as the JSON text of a Problem.

- `FunctionTests`: Python that calls functions of the program. The tests run where the program does not
  (`algo.reward.code.function_tests`), so arguments and results have to be plain values.
- `ProgramTests`: what the program prints for an input, compared by a rule or by a program of the data set.
"""

from __future__ import annotations

import ast
from typing import Literal, get_args

import msgspec

from sandbox.require import at_least, one_of, require

Rule = Literal["exact", "lines", "tokens", "numbers"]


class FunctionTests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="functions"):
    """Tests in Python, each a text of its own; one that raises has failed.

    setup: runs before them, trusted as they are. functions: the names that they call; the program has to define them,
    at its top or in a class Solution. in_place: whether the tests see what a call changes in its arguments (lists,
    dicts and sets). Otherwise arguments stay as they were, and a program cannot change what a test compares with later.
    reference: a program that passes, "" if there is none.

    >>> FunctionTests(functions=("add",), tests=("assert add(2, 3) == 5",)).functions
    ('add',)
    """

    setup: str = ""
    functions: tuple[str, ...]
    tests: tuple[str, ...]
    in_place: bool = False
    reference: str = ""

    def __post_init__(self) -> None:
        if not self.functions or not all(name.isidentifier() for name in self.functions):
            raise ValueError(f"functions must be names, at least one, got {self.functions!r}")
        if not self.tests:
            raise ValueError("tests must hold at least one test, got none")
        refuse_unsafe(self)


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A standard input and what may be printed for it, any one of `expected`."""

    stdin: str
    expected: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.expected:
            raise ValueError("expected must hold at least one text, got none")


class ProgramTests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="programs"):
    """Inputs and outputs of a whole program.

    rule: how what is printed is compared, see `algo.reward.code.compare`. tolerance: of "numbers", absolute and
    relative. checker: Python that defines `check(stdin, expected, printed)`, which decides in place of the rule: it
    returns whether `printed` is right for one text of `expected`. reference: as in FunctionTests.
    """

    cases: tuple[Case, ...]
    rule: Rule = "tokens"
    tolerance: float = 1e-6
    checker: str = ""
    reference: str = ""

    def __post_init__(self) -> None:
        if not self.cases:
            raise ValueError("cases must hold at least one case, got none")
        require("rule", self.rule, one_of(*get_args(Rule)))
        require("tolerance", self.tolerance, at_least(0.0))
        if self.checker:
            refuse_unsafe_code("the checker", self.checker)
            if not any(
                isinstance(each, ast.FunctionDef) and each.name == "check" for each in ast.parse(self.checker).body
            ):
                raise ValueError(
                    f"the checker defines no check(stdin, expected, printed): {self.checker.strip()[:100]!r}"
                )


Tests = FunctionTests | ProgramTests


class Problem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """name: of the problem in its data set. hidden: what grades. public: what a model may run; None: nothing."""

    name: str
    hidden: Tests
    public: Tests | None = None


def encode_problem(problem: Problem) -> str:
    """Returns the problem as text for `Prompt.answer`."""
    return msgspec.json.encode(problem).decode()


def decode_problem(text: str) -> Problem:
    """Raises ValueError for a text that is no problem."""
    try:
        return msgspec.json.decode(text, type=Problem)
    except msgspec.DecodeError as error:
        raise ValueError(f"a problem must be a Problem as JSON, as encode_problem writes it: {error}") from error


# With these, text that a program returned could be run, or read as objects, where the tests are.
EXECUTES = {"eval", "exec", "compile", "__import__", "getattr", "globals", "locals", "vars", "breakpoint", "open"}
LOADS = {"pickle", "marshal", "dill", "cloudpickle", "shelve", "runpy", "importlib", "subprocess", "ctypes", "code"}
LOADS |= {"inspect", "gc", "os", "posix", "sys", "builtins", "multiprocessing"}


def refuse_unsafe(tests: FunctionTests) -> None:
    """Raises ValueError naming the first test that a program could forge, or that looks at more than its answers."""
    refuse_unsafe_code("the setup", tests.setup)
    for number, test in enumerate(tests.tests):
        refuse_unsafe_code(f"test {number}", test, tests.functions)


def refuse_unsafe_code(where: str, code: str, functions: tuple[str, ...] = ()) -> None:
    """Raises ValueError if the code could execute a text, or looks into one of the functions instead of calling it.

    It names what the tests of public data sets might do; the code itself is trusted not to hide it.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where} is not Python: {error}") from error
    results = _results_of(tree, functions)
    for node in ast.walk(tree):
        reason = ""
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in EXECUTES:
                reason = f"calls {name}()"
            case ast.Import(names=names) if loads := LOADS & {alias.name.partition(".")[0] for alias in names}:
                reason = f"imports {min(loads)}"
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in LOADS:
                reason = f"imports {module}"
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in functions:
                reason = f"looks at {name}.{attribute}"
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in results and attribute not in PLAIN:
                raise ValueError(
                    f"{where} uses .{attribute} of a result, and results are plain values: {code.strip()[:100]!r}"
                )
            case ast.Attribute(value=ast.Call(func=ast.Name(id=name)), attr=attribute) if (
                name in functions and attribute not in PLAIN
            ):
                raise ValueError(
                    f"{where} uses {name}().{attribute}, and results are plain values: {code.strip()[:100]!r}"
                )
        if reason:
            raise ValueError(f"{where} {reason}, so what a program returns could decide it: {code.strip()[:100]!r}")


PLAIN = {name for kind in (int, float, complex, str, bytes, list, tuple, set, frozenset, dict) for name in dir(kind)}
"""Attributes of plain values; a test that uses another one of a result can be passed by no program."""


def _results_of(tree: ast.Module, functions: tuple[str, ...]) -> set[str]:
    """Returns the names to which the code assigns nothing but what one of the functions returned."""
    results, others = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call(func=ast.Name(id=name))) if name in functions:
                results.add((target, id(node.targets[0])))
            case ast.Name(id=target, ctx=ast.Store()):
                others.add((target, id(node)))
            case ast.arg(arg=target):
                others.add((target, id(node)))
    return {target for target, _ in results} - {target for target, _ in others - results}
