"""Problems: which tests are refused, how outputs are compared, and where a program is looked for."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from algo.reward.code.compare import same
from algo.reward.code.extract import last_block, program_in_call
from algo.reward.code.problem import (
    Case,
    FunctionTests,
    Problem,
    ProgramTests,
    decode_problem,
    encode_problem,
)
from algo.reward.code.programs import with_imports
from sandbox import TIERS
from sandbox.tiers import choose
from tests.support.fakes import a_trajectory, a_use


@pytest.mark.parametrize(
    "test",
    [
        "assert eval(f(1)) == 2",
        "exec(f(1))",
        "assert compile(f(1), '', 'eval')",
        "import pickle\nassert pickle.loads(f(1)) == 2",
        "from subprocess import run\nassert run(f(1))",
        "import os.path",
        "import inspect\nassert 'for' not in inspect.getsource(f)",
        "assert f.__code__.co_argcount == 1",
        "assert getattr(f(1), 'x')",
        "assert f(1) ==",
        "assert f('\0')",
        "n = f([1, 2])\nassert n.val == 1 and n.next.val == 2",
        "assert f(1).shape == (2,)",
        "s = f()\ns.push(1)\nassert s.pop() == 1",
    ],
)
def test_a_test_that_a_result_could_decide_is_refused_by_its_number(test: str) -> None:
    with pytest.raises(ValueError, match="test 1 "):
        FunctionTests(functions=("f",), tests=("assert f(1) == 1", test))


@pytest.mark.parametrize(
    "test",
    [
        "assert f('a').upper() == 'A'",
        "n = f(1)\nassert n.real == 1",
        "n = f(1)\nimport types\nn = types.SimpleNamespace(a=n)\nassert n.a == 1",
        "def g(n):\n    return n.any\nn = f(1)",
    ],
)
def test_attributes_that_a_plain_value_may_have_are_no_reason_to_refuse(test: str) -> None:
    assert FunctionTests(functions=("f",), tests=(test,)).tests == (test,)


@pytest.mark.parametrize("checker", ["def chek(i, e, p): return True", "x = 1", "class check: pass"])
def test_a_checker_without_check_is_refused(checker: str) -> None:
    with pytest.raises(ValueError, match="check"):
        ProgramTests(cases=(Case(stdin="", expected=("",)),), checker=checker)


def test_setup_and_checker_are_looked_at_too() -> None:
    with pytest.raises(ValueError, match="setup"):
        FunctionTests(setup="import sys", functions=("f",), tests=("f(1)",))
    with pytest.raises(ValueError, match="checker"):
        ProgramTests(cases=(Case(stdin="", expected=("",)),), checker="def check(i, e, p): return eval(p)")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"name": "a"}', "hidden"),
        ('{"name": "a", "hidden": {"type": "functions", "functions": ["f"], "tests": []}}', "tests"),
        ('{"name": "a", "hidden": {"type": "functions", "functions": ["f g"], "tests": ["1"]}}', "functions"),
        ('{"name": "a", "hidden": {"type": "programs", "cases": []}}', "cases"),
        ('{"name": "a", "hidden": {"type": "programs", "cases": [{"stdin": "", "expected": []}]}}', "expected"),
        (
            '{"name": "a", "hidden": {"type": "programs", "rule": "x", "cases": [{"stdin": "", "expected": ["1"]}]}}',
            "rule",
        ),
        (
            '{"name": "a", "hidden": {"type": "functions", "functions": ["f"], "tests": ["f()"], "in_plce": true}}',
            "in_plce",
        ),
        (
            '{"name": "a", "hidden": {"type": "programs", "cases": [{"stdin": "", "expected": ["1"]}], "ruel": "x"}}',
            "ruel",
        ),
        (
            '{"name": "a", "hidden": {"type": "programs", "cases": [{"stdin": "", "expected": ["1"], "stdn": "2"}]}}',
            "stdn",
        ),
        (
            '{"name": "a", "hidden": {"type": "functions", "functions": ["f"], "tests": ["f()"]}, "pubic": null}',
            "pubic",
        ),
        ("42", "Problem"),
    ],
)
def test_a_problem_that_is_none_is_refused_by_its_field(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        decode_problem(text)


def test_a_problem_travels_as_text() -> None:
    hidden = ProgramTests(cases=(Case(stdin="1\n", expected=("2", "3")),), rule="numbers", tolerance=0.5)
    problem = Problem(name="p", hidden=hidden, public=FunctionTests(functions=("f",), tests=("assert f(1)",)))
    assert decode_problem(encode_problem(problem)) == problem


@pytest.mark.parametrize(
    ("printed", "expected", "right"),
    [
        ("1 2\n", "1 2\n", ["exact", "lines", "tokens", "numbers"]),
        ("1 2", "1 2\n", ["lines", "tokens", "numbers"]),
        ("1 2  \n\n", "1 2", ["lines", "tokens", "numbers"]),
        (" 1 2", "1 2", ["tokens", "numbers"]),
        ("1\n2", "1 2", ["tokens", "numbers"]),
        ("1.0005 x", "1 x", ["numbers"]),
        ("1000.5", "1000.0", ["numbers"]),
        ("1000.5", "1000", []),
        ("1000.0", "1000", ["numbers"]),
        ("100001", "100000", []),
        ("100000000000000000001.0", "100000000000000000000", []),
        ("011", "11", []),
        ("1e-999999999999999999999 2", "0.0 2", []),
        ("1e-99999 2", "0.0 2", ["numbers"]),
        ("1e0 x", "1 x", ["numbers"]),
        ("1.1 x", "1 x", []),
        ("1", "1 x", []),
        ("1 x y", "1 x", []),
        ("", "1", []),
        ("nan", "1", []),
        ("nan", "2", []),
        ("inf", "1e999", []),
        ("1_0", "10", []),
        ("١", "1", []),
        ("X", "x", []),
        ("1" * 65, "1" * 64 + "2", []),
    ],
)
def test_each_rule_compares_as_its_table_says(printed: str, expected: str, right: list[str]) -> None:
    rules = ("exact", "lines", "tokens", "numbers")
    assert [rule for rule in rules if same(printed, expected, rule, 1e-3)] == right


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("no program", None),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\nand\n```py\ny = 2\n```\nthat is all", "y = 2\n"),
        ("```\nx = 1\n```\nand\n```\ny = 2\n```\nthat is all", "y = 2\n"),
        ("```python\nx = 1\n```\nIt prints:\n```\n5\n```", "x = 1\n"),
        ("Input:\n```text\n5\n```\nso\n```python\nx = 1\n```", "x = 1\n"),
        ("```Python\nx = 1\n```", "x = 1\n"),
        ('```python title="a.py"\nx = 1\n```', "x = 1\n"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
        ("```text\n5\n```", None),
        ("```python\nbroken off\n\n```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```python\nunfinished", "x = 1\n"),
        ("```cpp\nint x;\n```", None),
        ("```python\nx = 1\n```\n<tool_call>{}</tool_call>", None),
        ("  ```python\n  x\n\n    y\n  ```", "x\n\n  y\n"),
    ],
)
def test_the_program_is_the_last_closed_block(text: str, program: str | None) -> None:
    assert last_block(text) == program


@pytest.mark.parametrize("part", ["```python\n", "```\n", "```", " ", "\n", "```python ", "   ```x\n"])
def test_looking_for_a_program_takes_time_linear_in_the_text(part: str) -> None:
    """A model that repeats itself writes such texts; the reward looks for programs on the event loop."""
    text = part * (500_000 // len(part))
    began = time.process_time()
    last_block(text)
    assert time.process_time() - began < 2.0


def test_the_program_may_be_that_of_the_last_call() -> None:
    uses = [
        replace(a_use(), arguments=json.dumps(each))
        for each in ({"code": "1"}, {"code": "2"}, {"other": 3}, {"code": 4})
    ]
    assert program_in_call(a_trajectory(uses=uses)) == "2"
    assert program_in_call(a_trajectory()) is None


def test_a_guest_program_runs_where_the_imports_of_its_request_are_warm() -> None:
    code = "import numpy as np\nfrom sympy import x\nimport class\nimport os.path"
    assert choose(with_imports("1\n", "1"), TIERS) == "bare"
    program = with_imports("1\n", code)
    compile(program, "program", "exec")
    assert choose(program, TIERS) == choose(code.replace("import class\n", ""), TIERS) != "bare"
