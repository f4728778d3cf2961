"""A quick start with a stage that holds the event loop up, under the profiler: the line is named."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import psutil
import pytest

from bench.commands.profile import release
from tests.support.paths import ROOT

RECIPE = f"""
import sys, time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, {str(ROOT)!r})

from algo.group.batch import make_batch, select_and_score
from algo.reward.math_reward import MathReward
from engine.programs.main import main
from engine.pipeline.pipeline import Stage
from engine.recipe import Recipe
from engine.tools.python_tool import PythonTool
from engine.telemetry.watchdog import exit_process
from engine.assembly.training import training
from recipes.quickstart import Config
from recipes.tiny.task import prompts, python_tool


async def thoughtless(inbox, outbox):
    async for group in inbox:
        time.sleep(0.2)
        await outbox.put(group)


async def train(config, run):
    async with training(config.training(), run) as job:
        groups = job.group(
            job.rollouts([python_tool(job.sandbox)]),
            MathReward(runner=job.sandbox),
            select_and_score(config.selector, config.seed),
        )
        mine = Stage(name="mine", run=thoughtless)
        stages = [job.admit(prompts("train", config.seed)), groups, mine, job.batch(), job.train(make_batch)]
        return await job.run(stages)


if __name__ == "__main__":
    exit_process(main(Recipe(config=Config, train=train)))
"""
SMALL = ["prompts_per_step=4", "group_size=2", "eval_problems=8", "replicas=1", "slots=2"]


@pytest.mark.timeout(300)
def test_a_profile_names_the_stage_and_the_line_that_holds_the_loop_up(tmp_path: Path) -> None:
    recipe = tmp_path / "thoughtless.py"
    recipe.write_text(RECIPE)
    options = [*SMALL, "steps=8", "rate=50", "torch=true"]  # it begins with step 1
    command = [sys.executable, "-m", "bench", "profile", str(recipe), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    line = RECIPE.splitlines().index("        time.sleep(0.2)") + 1
    assert f"thoughtless.py:{line} thoughtless" in done.stdout
    assert any(row.split()[1:2] == ["mine"] for row in done.stdout.splitlines() if "mine" in row)
    assert "learner" in done.stdout or "node" in done.stdout, "py-spy does not see each process of a short run"
    assert "aten::" in (ROOT / "runs" / "bench" / "learner_operators.txt").read_text()
    folder = ROOT / "runs" / "bench"
    assert ElementTree.parse(folder / "profile.svg").getroot().tag.endswith("svg")
    roles = {
        profile["name"].split(",")[0]
        for profile in json.loads((folder / "profile.speedscope.json").read_text())["profiles"]
    }
    assert roles & {"node", "replica", "learner"}
    lines = set(re.findall(r"<module> \(\S*thoughtless\.py:(\d+)\)", (folder / "profile.txt").read_text()))
    assert lines <= {str(len(RECIPE.splitlines()))}, "what starting takes, imports say, is left out"


ENDS_LATE = """
import signal, sys, time
from pathlib import Path

folder = Path(next(each for each in sys.argv if each.startswith("runs="))[5:])
try:
    print("begun", flush=True)
    time.sleep(100)
except KeyboardInterrupt:
    time.sleep(1)
    (folder / "summary").write_text("")
    print("ended", flush=True)
"""


def test_ctrl_c_lets_the_run_end_before_its_folder_goes(tmp_path: Path) -> None:
    recipe = tmp_path / "ends_late.py"
    recipe.write_text(ENDS_LATE)
    command = [sys.executable, "-m", "bench", "profile", str(recipe)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as going:
        assert going.stdout is not None
        assert going.stdout.readline() == "begun\n"
        os.killpg(going.pid, signal.SIGINT)
        printed, errors = going.communicate(timeout=60)
    assert (going.returncode, printed) == (130, "ended\n"), errors
    assert "Traceback" not in errors


HOLDS = """
import ctypes, os, signal, sys, time
attach = 16  # PTRACE_ATTACH: the process stays stopped as long as its tracer lives
assert ctypes.CDLL(None).ptrace(attach, int(sys.argv[1]), 0, 0) == 0
signal.signal(signal.SIGINT, lambda *_: sys.exit())
while True:
    time.sleep(1)
"""
RUNS = "import subprocess, sys; sys.exit(subprocess.run(['sleep', '3']).returncode)"


def test_a_sampler_that_holds_a_process_of_the_run_is_stopped_and_the_run_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = subprocess.Popen([sys.executable, "-c", RUNS])
    while not (below := psutil.Process(run.pid).children()):
        pass
    spying = subprocess.Popen([sys.executable, "-c", HOLDS, str(below[0].pid)])
    try:
        release(run, spying)
        assert run.wait(timeout=30) == 0
        assert spying.poll() == 0
    finally:
        for process in (spying, run):
            process.kill()
            process.wait()
    assert f"py-spy held sleep ({below[0].pid})" in capsys.readouterr().err
