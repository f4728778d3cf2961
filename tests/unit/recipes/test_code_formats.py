"""Rows of the public formats: what becomes of their fields, and what is refused."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path

import pytest

from algo.reward.code.problem import FunctionTests, ProgramTests, decode_problem
from engine.console.options import parse
from engine.data.prompts import read_prompts
from recipes.code.formats import answer_of, question_of, task_of
from recipes.code.grade import Config as GradeConfig
from recipes.code.grade import estimates, samples_of, tasks
from recipes.code.train import Config
from tests.support.code_problems import ROWS, TASKS
from tests.support.paths import ROOT

EXAMPLES = ROOT / "recipes" / "code" / "examples.jsonl"
HUMANEVAL = {
    "task_id": "H/0",
    "prompt": "def f(x):\n    'doc'\n",
    "entry_point": "f",
    "canonical_solution": "    return x\n",
}
HUMANEVAL |= {"test": "def check(candidate):\n    assert candidate(1) == 1\n"}
MBPP = {
    "task_id": 7,
    "text": "Write it.",
    "code": "def f(x): return x",
    "test_list": ["assert f(1) == 1", "assert g(2)"],
}
APPS = {"problem_id": 3, "question": "Do it.", "input_output": {"inputs": ["1\n"], "outputs": ["2\n"]}}
LIVE = {"question_id": "q", "question_content": "Do it.", "public_test_cases": "[]"}


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


class Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("this must not be printed",)


@pytest.mark.parametrize(
    ("outputs", "rule"),
    [(["0.3333\n", "1\n"], "numbers"), (["3\n", "1 2\n"], "tokens"), (["1.2.3 v1.0\n", "a.5\n"], "tokens")],
)
def test_outputs_with_decimals_are_compared_by_value(outputs: list[str], rule: str) -> None:
    apps = task_of({**APPS, "input_output": {"inputs": ["1\n", "2\n"], "outputs": outputs}}).problem.hidden
    cases = [{"input": "1", "output": output} for output in outputs]
    live = task_of({**LIVE, "private_test_cases": json.dumps(cases)}).problem.hidden
    assert isinstance(apps, ProgramTests)
    assert isinstance(live, ProgramTests)
    assert (apps.rule, live.rule, live.tolerance) == (rule, rule, 0.0)


def test_two_rows_of_one_name_are_not_graded_by_each_others_tests(tmp_path: Path) -> None:
    rows = [{**APPS, "input_output": {"inputs": ["1\n"], "outputs": [each]}} for each in ("1\n", "2\n")]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read, refused = tasks(data)
    assert list(read) == ["3"]
    assert read["3"] == task_of(rows[0])
    assert len(refused) == 1
    assert "'3'" in refused[0]


def test_a_sample_of_a_refused_row_does_not_end_the_grading(tmp_path: Path) -> None:
    data, samples = tmp_path / "data.jsonl", tmp_path / "samples.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in (APPS, {**MBPP, "test_list": ["eval(f(1))"]})))
    samples.write_text("".join(json.dumps({"task_id": name, "program": ""}) + "\n" for name in (7, 3)))
    config = GradeConfig(data=data, samples=samples)
    known, refused = tasks(data)
    assert [sample.task.problem.name for sample in samples_of(config, known, refused)] == ["3"]
    assert len(refused) == 2
    assert "'7'" in refused[1]
    with pytest.raises(ValueError, match="'7'"):
        list(samples_of(config, known, []))


@pytest.mark.parametrize("name", ["plain", "f"])
def test_a_function_may_have_any_name_and_is_not_used_on_what_is_expected(name: str) -> None:
    data = {"fn_name": name, "inputs": [[1]], "outputs": [3]}
    hidden = task_of({**APPS, "input_output": data}).problem.hidden
    assert isinstance(hidden, FunctionTests)
    space: dict[str, object] = {}
    exec(hidden.setup, space)
    space[name] = lambda value: 7
    with pytest.raises(AssertionError):
        exec(hidden.tests[0], space)


def test_every_example_is_a_prompt_whose_question_has_no_hidden_test() -> None:
    prompts = list(read_prompts(EXAMPLES, question=question_of, answer=answer_of))
    assert [decode_problem(prompt.answer).name for prompt in prompts] == list(TASKS)
    for prompt, row in zip(prompts, ROWS, strict=True):
        problem, [message] = decode_problem(prompt.answer), prompt.messages
        shown = set(getattr(problem.public, "tests", ()))
        assert not [
            test for test in getattr(problem.hidden, "tests", ()) if test in message["content"] and test not in shown
        ]
        solution = row.get("canonical_solution") or row.get("code") or problem.hidden.reference
        assert not solution or solution not in message["content"]


def test_humaneval() -> None:
    task = task_of(HUMANEVAL)
    hidden = task.problem.hidden
    assert isinstance(hidden, FunctionTests)
    assert (task.prefix, hidden.functions, hidden.reference) == (
        HUMANEVAL["prompt"],
        ("f",),
        task.prefix + "    return x\n",
    )
    assert "check(f)" in hidden.tests[0]


@pytest.mark.parametrize("text", ["text", "prompt"])
def test_mbpp_in_both_of_its_forms(text: str) -> None:
    row = {**{key: value for key, value in MBPP.items() if key != "text"}, text: "Write it."}
    problem = task_of({**row, "challenge_test_list": ["assert f(3) == 3"]}).problem
    assert isinstance(problem.hidden, FunctionTests)
    assert problem.hidden.functions == ("f", "g")
    assert (len(problem.hidden.tests), problem.public.tests) == (3, ("assert f(1) == 1",))


@pytest.mark.parametrize("form", [lambda value: value, json.dumps], ids=["object", "text"])
def test_apps_programs_and_functions(form) -> None:
    hidden = task_of({**APPS, "input_output": form(APPS["input_output"])}).problem.hidden
    assert isinstance(hidden, ProgramTests)
    assert hidden.cases[0].expected == ("2\n",)
    hidden = task_of(
        {**APPS, "input_output": form({"inputs": [["1"], ["2"]], "outputs": [["1\n"], ["2"]]})}
    ).problem.hidden
    lines = task_of({**APPS, "input_output": form({"inputs": [["1", "2"]], "outputs": [["3", "4"]]})}).problem.hidden
    assert (lines.cases[0].stdin, lines.cases[0].expected) == ("1\n2\n", ("3\n4\n",))
    calls = {"fn_name": "f", "inputs": [[1, [2]]], "outputs": [3]}
    assert "f(1, [2])" in task_of({**APPS, "input_output": form(calls)}).problem.hidden.tests[0]


def test_live_code_bench_plain_and_packed() -> None:
    cases = json.dumps([{"input": "1\n", "output": "2", "testtype": "stdin"}])
    for private in (cases, packed(cases), json.loads(cases)):
        hidden = task_of({**LIVE, "private_test_cases": private}).problem.hidden
        assert isinstance(hidden, ProgramTests)
        assert (hidden.cases[0].stdin, hidden.cases[0].expected) == ("1\n", ("2",))


@pytest.mark.parametrize(
    "private",
    [
        packed(Runs()),
        packed([1, 2]),
        packed({"input": "1"}),
        base64.b64encode(b"junk").decode(),
        base64.b64encode(zlib.compress(b"junk")).decode(),
        base64.b64encode(zlib.compress(b"")).decode(),
        "{}",
        "junk!",
    ],
)
def test_a_packed_field_runs_nothing(private: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="private_test_cases"):
        task_of({**LIVE, "private_test_cases": private})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"text": "a", "code": "b"}, "test_list"),
        ({**HUMANEVAL, "test": None}, "test"),
        ({**HUMANEVAL, "test": "def check(c):\n    assert eval(c(1))\n"}, "eval"),
        ({**HUMANEVAL, "entry_point": "f g"}, "f g"),
        ({**MBPP, "test_list": []}, "test"),
        ({**MBPP, "test_list": "assert"}, "test_list"),
        ({**MBPP, "test_list": ["assert f("]}, "test_list"),
        ({**MBPP, "text": ""}, "prompt"),
        ({**APPS, "input_output": "{"}, "input_output"),
        ({**APPS, "input_output": {"inputs": []}}, "outputs"),
        ({**APPS, "input_output": {"inputs": ["1"], "outputs": []}}, "1 inputs"),
        ({**APPS, "input_output": {"inputs": [], "outputs": []}}, "cases"),
        ({**APPS, "input_output": {"inputs": [1], "outputs": ["1"]}}, "must be text"),
        ({**LIVE, "private_test_cases": "[]"}, "cases"),
        ({**LIVE, "private_test_cases": '[{"input": "1"}]'}, "output"),
        ({"question": "q", "problem": {"name": "p"}}, "hidden"),
        ({"question": "q", "problem": "{"}, "problem"),
    ],
)
def test_a_row_that_is_no_problem_names_what_is_wrong(row, named) -> None:
    with pytest.raises(ValueError, match=named):
        task_of(row)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["data=no.jsonl"], ["data: no.jsonl"]),
        (["data=own.jsonl"], ["data: ", "line 1", "test_list"]),
        (["score=some"], ["score", "some"]),
        (["program=file"], ["program", "file"]),
        (["test_cpu_s=0"], ["test_cpu_s", "0"]),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, monkeypatch, capsys, given, told) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    with pytest.raises(SystemExit) as ended:
        parse(Config, [f"data={EXAMPLES}", f"held_out={EXAMPLES}", *given])
    assert ended.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert [part for part in told if part not in line] == []


def test_public_tests_need_the_name_of_the_problem() -> None:
    words = [f"data={EXAMPLES}", f"held_out={EXAMPLES}"]
    for more, shown in ([], False), (["public_tests=true"], True):
        config = parse(Config, [*words, *more])
        for prompt in config.prompts(EXAMPLES):
            name = decode_problem(prompt.answer).name
            assert (f"name of this problem is {name}." in prompt.messages[-1]["content"]) is shown
    assert config.public_problems().keys() == TASKS.keys()


def test_grade_says_which_file_is_missing(capsys) -> None:
    with pytest.raises(SystemExit):
        parse(GradeConfig, ["no.jsonl", f"data={EXAMPLES}"])
    assert "no.jsonl" in capsys.readouterr().err


def test_pass_at_k_is_over_problems_with_as_many_samples() -> None:
    assert estimates({"a": [True, False, False, False], "b": [False]}, (1, 2, 8)) == {"pass@1": 0.125, "pass@2": 0.5}
    assert estimates({}, (1,)) == {}


@pytest.mark.parametrize("output", [".", "nowhere/results.jsonl"])
def test_results_that_could_not_be_written_are_refused_before_programs_are_graded(tmp_path, output):
    data = tmp_path / "problems.jsonl"
    data.write_text("{}\n")
    with pytest.raises(ValueError, match="output"):
        GradeConfig(data=data, output=tmp_path / output)
