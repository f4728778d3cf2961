"""The recipe for code: two steps with the tiny agent, whose tool calls are programs, and one without any program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.runs import metrics

SMALL = ("prompts_per_step=4", "group_size=2", "eval_problems=4", "eval_every=2", "name=run", "rollout.max_tokens=230")
EXAMPLES = ROOT / "recipes" / "code" / "examples.jsonl"


def run(folder: Path, program: str, *given: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "recipes" / "code" / program), *given]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder)


@pytest.mark.timeout(300)
def test_calls_of_the_tiny_agent_are_graded_by_what_they_print(tmp_path: Path) -> None:
    for split in ("train", "test"):
        assert run(tmp_path, "word_problems.py", f"{split}.jsonl", f"split={split}", "rows=40").returncode == 0
    data = ("data=train.jsonl", "held_out=test.jsonl")
    ended = run(tmp_path, "train.py", *data, "program=call", "steps=2", *SMALL)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [row for row in metrics(tmp_path / "runs/run") if "reward" in row]
    assert len(rows) == 2
    assert all(row["reward"] == row["score/tests"] for row in rows), "each problem has one test"
    assert any(row["reward"] > 0 for row in rows)


@pytest.mark.timeout(300)
def test_a_model_that_writes_no_program_learns_nothing_and_ends_well(tmp_path: Path) -> None:
    """Prompts of the formats are long for the tiny agent, so there are rows of their own here."""
    problem = {"name": "p", "hidden": {"type": "functions", "functions": ["f"], "tests": ["assert f(1) == 1"]}}
    problem["public"] = problem["hidden"]
    (tmp_path / "own.jsonl").write_text(f"{json.dumps({'question': 'Lea has 6 books.', 'problem': problem})}\n" * 4)
    ended = run(
        tmp_path,
        "train.py",
        *("data=own.jsonl", "held_out=own.jsonl", "steps=1", "score=share", "system=", "public_tests=true", *SMALL),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [row, *_] = [row for row in metrics(tmp_path / "runs/run") if "reward" in row]
    assert row["reward"] == 0


def test_samples_of_a_file_are_graded(tmp_path: Path) -> None:
    find = "def find(values, target): return ([*values, target].index(target) + 1) % (len(values) + 1) - 1"
    samples = [
        {"task_id": "1", "program": "def repeated(text): return []"},
        {"task_id": "own/running_max", "completion": "    return [max(values[: i + 1]) for i in range(len(values))]\n"},
        {"task_id": "own-202", "text": f"So:\n```python\n{find}\n```\n"},
    ]
    (tmp_path / "samples.jsonl").write_text("".join(f"{json.dumps(sample)}\n" for sample in samples))
    ended = run(tmp_path, "grade.py", "samples.jsonl", f"data={EXAMPLES}", "k=1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == {"pass@1": pytest.approx(2 / 3)}
    results = [json.loads(line) for line in (tmp_path / "samples.jsonl_results.jsonl").read_text().splitlines()]
    assert [result["passed"] for result in results] == [False, True, True]


def test_what_could_not_be_graded_is_a_gap_with_an_exit_status(tmp_path: Path) -> None:
    rows = [
        json.loads(EXAMPLES.read_text().splitlines()[0]),
        {"task_id": "x", "prompt": "p", "entry_point": "f", "test": "eval(1)"},
    ]
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ended = run(tmp_path, "grade.py", "data=data.jsonl")
    assert (ended.returncode, "line 2" in ended.stderr) == (1, True)
    assert json.loads(ended.stdout.splitlines()[-1]) == {"pass@1": 1.0}


def test_problems_that_are_broken_are_named(tmp_path: Path) -> None:
    def row(name: str, *tests: str, **more: object) -> dict[str, object]:
        hidden = {"type": "functions", "functions": ["f"], "tests": tests, "reference": "def f(x): return x", **more}
        return {"question": "q", "problem": {"name": name, "hidden": hidden}}

    rows = [
        row("sound", "assert f(1) == 1"),
        row("wrong", "assert f(1) == 2"),
        row("hollow", "f(1)"),
        row("module", "import no_such_module\nassert f(1) == 1"),
        row("hollow-too", "f(1)", reference=""),
        {"question": "q", "problem": {"name": "blank", "hidden": {
            "type": "programs", "cases": [{"stdin": "1", "expected": [""]}], "reference": ""}}},
    ]  # fmt: skip
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ended = run(tmp_path, "grade.py", "data=data.jsonl")
    assert ended.returncode == 1, ended.stderr
    broken = [line.split(": ")[1] for line in ended.stdout.splitlines() if line.startswith("broken: ")]
    assert sorted(broken) == ["blank", "hollow", "hollow-too", "wrong"]
    assert "module: " in ended.stderr
    assert "no_such_module" in ended.stderr


def test_a_row_that_cannot_be_graded_ends_a_run_before_anything_starts(tmp_path: Path) -> None:
    lines = EXAMPLES.read_text().splitlines()
    refused = {"task_id": "x", "prompt": "p", "entry_point": "f", "test": "eval(1)"}
    (tmp_path / "data.jsonl").write_text("\n".join([*lines[:10], json.dumps(refused), *lines[10:]]) + "\n")
    ended = run(tmp_path, "train.py", "data=data.jsonl", f"held_out={EXAMPLES}", "steps=1", *SMALL)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "line 11" in ended.stderr
    assert "eval" in ended.stderr
