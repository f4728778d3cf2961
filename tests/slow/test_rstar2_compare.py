"""GRPO-RoC against GRPO on a checkpoint, as a user starts it: cut off, and continued by the same command."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.support.conversations import installed
from tests.support.paths import ROOT
from tests.support.runs import Run

COMPARE = ROOT / "recipes" / "rstar2" / "compare.py"


@pytest.mark.timeout(1200)
def test_a_comparison_that_was_cut_off_goes_on(tmp_path, started):
    problems = tmp_path / "problems.jsonl"
    rows = [{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(4)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = [f"model={installed(tmp_path / 'model')}", f"data={problems}", f"held_out={problems}", "group_size=2"]
    fields += ["seeds=0,1", "steps=1", "eval_every=1", "max_tokens=980", f"folder={tmp_path / 'runs'}"]
    command = [sys.executable, str(COMPARE), *fields, f"output={tmp_path / 'page'}"]
    run = Run([command[0], "-u", *command[1:]])
    started.append(run)
    run.until("[2/6]")
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end() == 130, run.text()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished before" in done.stdout
    content = json.loads((tmp_path / "page" / "results.json").read_text())
    assert content["values"]["seeds"] == [0, 1]
    assert set(content["values"]["curves"]["eval/accuracy"]) == {"roc", "grpo4", "grpo2"}
    assert (tmp_path / "page.md").exists()
