"""The bench of graded programs: what the plain processes run, and that a wrong program is noticed there."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from algo.reward.code.problem import Case, FunctionTests, ProgramTests
from bench.benches.code import Options, in_one_process, through

FUNCTIONS = FunctionTests(
    functions=("f",), tests=("assert f(1) == 1", "assert f(2) == 2"), reference="def f(x): return x"
)
METHOD = FunctionTests(
    functions=("f",), tests=("assert f(1) == 1",), reference="class Solution:\n    def f(self, x): return x"
)
PROGRAM = ProgramTests(
    cases=(Case(stdin="1\n", expected=("3", "2")), Case(stdin="5\n", expected=("6",))),
    reference="print(int(input()) + 1)",
)


async def executed(code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(AssertionError):
        exec(compile(code, "program", "exec"), {})
    return output.getvalue()


def test_functions_take_a_process_for_all_tests_or_for_each_and_programs_one_for_each_input() -> None:
    counts = [
        [len(in_one_process(tests, each_alone=each_alone)) for each_alone in (False, True)]
        for tests in (FUNCTIONS, METHOD, PROGRAM)
    ]
    assert counts == [[1, 2], [1, 1], [2, 2]]


@pytest.mark.parametrize("each_alone", [False, True])
async def test_a_right_program_passes_and_a_wrong_one_is_counted(each_alone: bool, monkeypatch) -> None:
    grade = through(executed, each_alone=each_alone)
    monkeypatch.setattr("sys.stdin", io.StringIO())  # the programs replace it
    assert [await grade(tests) for tests in (FUNCTIONS, METHOD, PROGRAM)] == [True] * 3
    wrong_function = FunctionTests(functions=("f",), tests=FUNCTIONS.tests, reference="def f(x): return 1")
    wrong_program = ProgramTests(cases=PROGRAM.cases, reference="print(2)")
    assert [await grade(tests) for tests in (wrong_function, wrong_program)] == [False] * 2


def test_data_without_references_is_refused(tmp_path: Path) -> None:
    hidden = {"type": "programs", "cases": [{"stdin": "", "expected": ["1"]}]}
    row = {"question": "q", "problem": {"name": "p", "hidden": hidden}}
    (tmp_path / "data.jsonl").write_text(f"{json.dumps(row)}\n")
    with pytest.raises(ValueError, match="reference"):
        Options(data=tmp_path / "data.jsonl").tests()
