"""Reads rows of the public data sets of programming problems, by the names of their fields.

| format | known by | tests |
|---|---|---|
| HumanEval | `entry_point`, `test` | a function `check(candidate)` |
| MBPP | `test_list` | asserts |
| APPS, TACO | `input_output` | inputs and outputs, of a function (`fn_name`) or of a program |
| LiveCodeBench | `public_test_cases`, `private_test_cases` | the same, public ones and hidden ones |
| ours | `problem` | a Problem as JSON, beside `question` |

A row with a test that cannot be graded safely is refused with a ValueError that names the test. A row of HumanEval or
MBPP whose tests look at what a call changes in its arguments needs a further field, `in_place`: true.
"""

from __future__ import annotations

import ast
import base64
import binascii
import builtins
import io
import json
import pickle
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from algo.reward.code.problem import (
    Case,
    FunctionTests,
    Problem,
    ProgramTests,
    Rule,
    Tests,
    decode_problem,
    encode_problem,
)

DECIMAL = re.compile(r"(?<!\S)[+-]?\d{1,40}\.\d{1,40}(?!\S)")
MOST_BYTES = 256 << 20  # of unpacked private tests; LiveCodeBench's largest have some dozens of MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A row: what a model is asked, and the problem by which its program is graded.

    prefix: what a completion continues, as HumanEval has it; "" where a program is whole.
    """

    question: str
    problem: Problem
    prefix: str = ""


Row = Mapping[str, Any]


def task_of(row: Row) -> Task:
    """Returns the task of a row. Raises ValueError naming the field, and a test that is refused."""
    for field, read in _READERS.items():
        if row.get(field) is not None:
            return read(row)
    raise ValueError(
        f"the row is of no format that is known by one of {', '.join(_READERS)}; it has {', '.join(row)}. "
        "Fix: write a row with question and problem, see recipes/code/README.md"
    )


def question_of(row: Row) -> str:
    """Returns the question of a row, for `read_prompts(question=...)`."""
    return task_of(row).question


def answer_of(row: Row) -> str:
    """Returns the problem of a row as text, for `read_prompts(answer=...)`."""
    return encode_problem(task_of(row).problem)


def _ours(row: Row) -> Task:
    given = row["problem"]
    problem = decode_problem(given if isinstance(given, str) else json.dumps(given))
    return Task(question=_text(row, "question"), problem=problem, prefix=row.get("prefix") or "")


def _humaneval(row: Row) -> Task:
    prompt, entry_point, test = (_text(row, name) for name in ("prompt", "entry_point", "test"))
    solution = row.get("canonical_solution") or ""
    tests = FunctionTests(
        # Tests use helpers that the prompt defines; these are the prompt's own, whatever the program makes of them.
        setup=prompt,
        functions=(entry_point,),
        tests=(f"{test}\n\ncheck({entry_point})\n",),
        in_place=bool(row.get("in_place")),
        reference=prompt + solution if solution else "",
    )
    question = f"Complete this function. Answer with the whole program.\n\n```python\n{prompt.rstrip()}\n```"
    return Task(question=question, problem=Problem(name=_name(row, "task_id"), hidden=tests), prefix=prompt)


def _mbpp(row: Row) -> Task:
    tests = _texts(row, "test_list")
    hidden = (*tests, *_texts(row, "challenge_test_list"))
    if not tests:
        raise ValueError("test_list must hold at least one test, got none")
    # Tests of MBPP use math without importing it: their authors' programs did.
    setup = "\n".join(["import math", row.get("test_setup_code") or "", *_texts(row, "test_imports")])
    text = row.get("text") or _text(row, "prompt")
    functions, reference = _called(setup, hidden), row.get("code") or ""
    in_place = bool(row.get("in_place"))
    problem = Problem(
        name=_name(row, "task_id"),
        hidden=FunctionTests(setup=setup, functions=functions, tests=hidden, in_place=in_place, reference=reference),
        public=FunctionTests(setup=setup, functions=_called(setup, tests[:1]), tests=tests[:1], in_place=in_place),
    )
    return Task(question=f"{text}\n\nYour program has to pass this test, and others:\n\n{tests[0]}", problem=problem)


def _apps(row: Row) -> Task:
    packed = row["input_output"]
    try:
        data = json.loads(packed) if isinstance(packed, str) else packed
        inputs, outputs, function = data["inputs"], data["outputs"], data.get("fn_name")
        if len(inputs) != len(outputs):
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"input_output must be JSON with inputs and outputs, as many of each: {error!r}") from error
    reference = _first_solution(row)
    hidden: Tests
    if function:
        # Some rows wrap each result in a list. Where all are lists of one, nothing says which, and both are right.
        wrapped = all(isinstance(result, list) and len(result) == 1 for result in outputs)
        results = [[result, *(result if wrapped else [])] for result in outputs]
        tests = [_call(function, given, either) for given, either in zip(inputs, results, strict=True)]
        hidden = FunctionTests(setup=LISTS, functions=(function,), tests=tuple(tests), reference=reference)
    else:
        cases = [Case(stdin=_lines(each), expected=(_lines(out),)) for each, out in zip(inputs, outputs, strict=True)]
        hidden = ProgramTests(cases=tuple(cases), rule=_rule(cases), reference=reference)
    problem = Problem(name=_name(row, "problem_id", "id", "name", "url"), hidden=hidden)
    return Task(question=_with_starter(_text(row, "question"), row, function), problem=problem)


def _live_code_bench(row: Row) -> Task:
    public, private = _cases(row, "public_test_cases"), _cases(row, "private_test_cases")
    metadata = row.get("metadata") or {}
    function = (json.loads(metadata) if isinstance(metadata, str) else metadata).get("func_name")
    problem = Problem(
        name=_name(row, "question_id", "question_title"),
        hidden=_of_cases([*public, *private], function),
        public=_of_cases(public, function) if public else None,
    )
    question = row.get("question_content") or _text(row, "question")
    return Task(question=_with_starter(question, row, function), problem=problem)


def _of_cases(cases: Sequence[Row], function: str | None) -> Tests:
    try:
        pairs = [(case["input"], case["output"]) for case in cases]
        if not function:
            programs = [Case(stdin=given, expected=(expected,)) for given, expected in pairs]
            # LiveCodeBench compares decimals by their value and allows no difference.
            return ProgramTests(cases=tuple(programs), rule=_rule(programs), tolerance=0.0)
        tests = [
            _call(function, [json.loads(line) for line in given.split("\n") if line.strip()], [json.loads(expected)])
            for given, expected in pairs
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"test cases need input and output, of a function as JSON: {error!r}") from error
    return FunctionTests(setup=LISTS, functions=(function,), tests=tuple(tests))


def _rule(cases: Sequence[Case]) -> Rule:
    """Returns "numbers" if some output holds a decimal, which programs print with more digits or fewer."""
    return "numbers" if any(DECIMAL.search(text) for case in cases for text in case.expected) else "tokens"


def _cases(row: Row, field: str) -> list[Row]:
    """Returns test cases: a list, its JSON, or that packed by base64, zlib and pickle as LiveCodeBench does."""
    value = row.get(field) or "[]"
    try:
        if isinstance(value, str) and not value.lstrip().startswith("["):
            value = _unpacked(value)
        return json.loads(value) if isinstance(value, str) else list(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{field} must be a list of test cases as JSON: {error}") from error


def _unpacked(text: str) -> str:
    """Returns the text in a packed field. The pickle may hold text and no other object, so reading it runs no code."""
    try:
        unzip = zlib.decompressobj()
        data = unzip.decompress(base64.b64decode(text, validate=True), MOST_BYTES)
        if unzip.unconsumed_tail:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        value = _TextOnly(io.BytesIO(data)).load()
    except (
        binascii.Error,
        zlib.error,
        pickle.UnpicklingError,
        EOFError,
        IndexError,
        KeyError,
        AttributeError,
    ) as error:
        raise ValueError(f"neither JSON nor packed: {error}") from error
    if not isinstance(value, str):
        raise ValueError(f"a packed {type(value).__name__} instead of text")
    return value


class _TextOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only text is read")


# A list and a tuple of the same values are the same result, as these data sets say. No function of a program may have
# the name of the helper, since it would stand in its place.
LISTS = """
def with_lists_(value):
    if isinstance(value, (list, tuple)):
        return [with_lists_(part) for part in value]
    if isinstance(value, dict):
        return {str(key): with_lists_(part) for key, part in value.items()}
    return value
"""


def _call(function: str, arguments: Sequence[Any], expected: Sequence[Any]) -> str:
    """Returns the test that a call gives one of the values."""
    call = f"{function}({', '.join(map(repr, arguments))})"
    return f"assert with_lists_({call}) in [with_lists_(value) for value in {list(expected)!r}]"


def _lines(value: Any) -> str:
    """Returns an input or output as text; some rows have it as a list of lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value)) + "\n"
    if not isinstance(value, str):
        raise ValueError(f"inputs and outputs of a program must be text, got {value!r:.80}")
    return value


def _with_starter(question: str, row: Row, function: str | None) -> str:
    starter = row.get("starter_code") or ""
    if starter.strip():
        return f"{question}\n\nBegin with this code:\n\n```python\n{starter.rstrip()}\n```"
    if function:
        return f"{question}\n\nWrite a function {function}."
    return f"{question}\n\nThe program reads standard input and writes standard output."


def _first_solution(row: Row) -> str:
    solutions = row.get("solutions") or []
    try:
        solutions = json.loads(solutions) if isinstance(solutions, str) else solutions
        return next((each for each in solutions if isinstance(each, str)), "")
    except ValueError:
        return ""


def _called(setup: str, tests: Sequence[str]) -> tuple[str, ...]:
    """Returns the names that tests use and nobody has defined: the functions that a program has to have."""
    try:
        trees = [ast.parse(code) for code in (setup, *tests)]
    except SyntaxError as error:
        raise ValueError(f"test_list must hold Python: {error}") from error
    nodes = [node for tree in trees for node in ast.walk(tree)]
    defined = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    defined |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    defined |= {(each.asname or each.name).partition(".")[0] for node in imports for each in node.names}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    used = dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return tuple(name for name in used if name not in defined and not hasattr(builtins, name))


def _text(row: Row, field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{field} must be text, got {value!r:.80}")
    return value


def _texts(row: Row, field: str) -> tuple[str, ...]:
    value = row.get(field)
    if value is None:
        return ()
    if isinstance(value, str) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{field} must be a list of texts, got {value!r:.80}")
    return tuple(value)


def _name(row: Row, *fields: str) -> str:
    return next((str(row[field]) for field in fields if row.get(field) is not None), "unnamed")


_READERS = {
    "problem": _ours,
    "entry_point": _humaneval,
    "test_list": _mbpp,
    "input_output": _apps,
    "public_test_cases": _live_code_bench,
}
