"""The programs of recipes/tools run on the tiny agent, which calls no tool of theirs, to the end and on."""

import subprocess
import sys

import pytest

from engine.recording.reader import RecordedRun
from tests.support.paths import ROOT
from tests.support.runs import metrics
from tests.unit.recipes.test_tools_harbor import task as harbor_task

SMALL = ("prompts_per_step=4", "group_size=2", "eval_problems=4", "eval_every=2", "rollout.max_tokens=960")


def run(program, runs, *fields):
    command = [sys.executable, str(ROOT / "recipes" / "tools" / program), f"runs={runs}", "name=run"]
    return subprocess.run([*command, *SMALL, *fields], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("program", ["sql.py", "files.py"])
def test_two_steps_are_made_and_recorded(program, tmp_path):
    part = run(program, tmp_path, "steps=2")
    assert part.returncode == 0, part.stdout + part.stderr
    assert len([row for row in metrics(tmp_path / "run") if "reward" in row]) == 2
    groups = [each.group for step in (1, 2) for each in RecordedRun(tmp_path / "run").groups(step)]
    assert len(groups) == 8
    assert all(member.error is None for group in groups for member in group.trajectories)
    assert all(member.states == {} for group in groups for member in group.trajectories), "the record keeps none"


@pytest.mark.parametrize(
    ("program", "option", "word"),
    [
        ("sql.py", "data=rows.json", "databases"),
        ("sql.py", "changes=2", "changes"),
        ("files.py", "tasks=folder", "held_out"),
        ("files.py", "output_chars=1", "output_chars"),
    ],
)
def test_an_option_that_does_not_fit_is_named_before_anything_starts(program, option, word, tmp_path):
    ended = run(program, tmp_path, option, "steps=1")
    assert ended.returncode == 2
    assert word in ended.stderr


def tasks_in(folder):
    """Writes three tasks in the shape of Harbor: one is sound, one has no reference, one passes on nothing."""
    for name, test, solution in (
        ("sound", "from b import f\n\ndef test_it():\n    assert f(1) == 2\n", "def f(x):\n    return x + 1\n"),
        ("unproven", "from b import f\n\ndef test_it():\n    assert f(1) == 2\n", None),
        ("hollow", "def test_it():\n    assert 1 == 1\n", "def f(x):\n    return x + 1\n"),
    ):
        changed = {"tests__test_outputs.py": test, "solution__solve.sh": None, "environment__a.py": "def f(x): ...\n"}
        harbor_task(folder / name, **changed, **({} if solution is None else {"solution__b.py": solution}))
    return folder


def check(*fields):
    command = [sys.executable, str(ROOT / "recipes" / "tools" / "check.py"), *fields]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.timeout(150)
def test_tasks_are_checked_by_a_command(tmp_path):
    folder = tasks_in(tmp_path / "tasks")
    (folder / "unread").mkdir()
    (folder / "unread" / "task.toml").write_text("[")
    ended = check(f"tasks={folder}")
    assert ended.returncode == 1, ended.stderr
    broken = [line for line in ended.stdout.splitlines() if line.startswith("broken: ")]
    noted = [line for line in ended.stdout.splitlines() if line.startswith("note: ")]
    assert sorted(line.split(": ")[1] for line in broken) == ["hollow", "unread"]
    assert [line.split(": ")[1] for line in noted] == ["unproven"]
    for fields in ((), ("data=x.json",), (f"tasks={folder}", "data=x.json", "databases=x")):
        assert check(*fields).returncode == 2


@pytest.mark.timeout(400)
def test_a_run_on_broken_tasks_ends_before_it_trains(tmp_path):
    tasks = tasks_in(tmp_path / "tasks")
    ended = run("files.py", tmp_path, f"tasks={tasks}", f"held_out={tasks}", "steps=2")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "hollow" in ended.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
