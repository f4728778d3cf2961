"""The programs of recipes/tools run on the tiny agent, which calls no tool of theirs, to the end and on."""

import subprocess
import sys

import pytest

from engine.recording.reader import RecordedRun
from tests.support.paths import ROOT
from tests.support.runs import metrics

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
