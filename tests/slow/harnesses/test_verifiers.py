"""Environments of verifiers (version 1) train: by one agent, and by its own best-of-n, with a taskset of ours.

Its example tasksets live in a repository, not in the package; what ships with it are the ways to play them.
"""

import os
import re
import subprocess
import sys

import pytest

from engine.recording.reader import RecordedRun
from engine.recording.rollouts import load_tokenizer, rollouts_of
from tests.support.packages import environment_with
from tests.support.paths import ROOT
from tests.support.runs import metrics

VERIFIERS = ("verifiers==0.4.0",)
RECIPE = str(ROOT / "recipes" / "environments" / "train_verifiers.py")
SMALL = ("prompts_per_step=4", "group_size=2", "steps=1")


def run(python, runs, *fields):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")}
    command = [str(python), RECIPE, f"runs={runs}", "name=vf", *SMALL, *fields]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("environment", ["", "best-of-n"])
def test_an_environment_trains_a_step_on_the_rewards_that_it_gave(environment, tmp_path):
    python = environment_with("verifiers", *VERIFIERS) / "bin" / "python"
    fields = ("taskset=verifiers_example", "harness=verifiers_example", f"environment={environment}")
    ended = run(python, tmp_path, *fields)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [row] = [row for row in metrics(tmp_path / "vf") if "reward" in row]
    assert row["learner/trajectories"] > 0
    assert row["rollout/trajectories_failed"] == 0
    record = RecordedRun(tmp_path / "vf")
    trajectories = [each.trajectory for each in rollouts_of(record, 1, load_tokenizer(record.tokenizer))]
    assert len(trajectories) == 4 * 4
    for each in trajectories if not environment else ():
        assert each.reward == 1.0 * right(each) + 0.5 * ("<answer>" in each.text)
    assert len({each.reward for each in trajectories}) > 1, "some answered and some did not"


def right(trajectory):
    question = trajectory.prompt.messages[-1]["content"]
    first, second = (int(part) for part in question.removeprefix("Compute ").split(" + "))
    return str(first + second) in re.findall(r"-?\d+", trajectory.text)


def test_what_is_missing_is_named(tmp_path):
    python = environment_with("verifiers", *VERIFIERS) / "bin" / "python"
    ended = run(python, tmp_path, "taskset=no_such_taskset")
    assert ended.returncode == 2
    assert "no_such_taskset" in ended.stderr
    ended = run(sys.executable, tmp_path, "taskset=any")
    assert ended.returncode == 2
    assert "pip install verifiers" in ended.stderr
