"""The server's answers against the types that the page's JavaScript declares for them (static/answers.js)."""

import json
import subprocess

import msgspec
import pytest

from engine.view.questions import Questions
from engine.view.run_files import RunFiles
from tests.support.paths import ROOT
from tests.support.viewed_runs import write_viewed_run

TSC = ROOT / "requirements" / "node_modules" / ".bin" / "tsc"
RUN = {"run": "0"}
STEP = {"run": "0", "step": "3"}
STEPS = {"run": "0", "first": "3", "last": "3"}
ASKED = {
    "runs": {},
    "metrics": RUN,
    "now": RUN,
    "groups": STEP,
    "trajectory": STEP | {"group": "1", "sample": "0"},
    "timeline": STEPS,
    "placement": STEP,
    "tool-calls": STEPS,
    "tokens": STEP,
    "about": RUN,
    "changes": RUN,
    "comparison": RUN | {"other": "0"},
}


@pytest.mark.skipif(not TSC.exists(), reason="tsc is not installed. Fix: make lint-page")
def test_each_answer_has_its_declared_type(tmp_path):
    write_viewed_run(tmp_path / "run")
    questions = Questions([RunFiles(tmp_path / "run")])
    answers = msgspec.json.encode({name: questions.answer(name, query) for name, query in ASKED.items()})
    declared = 'import type { Answers } from "view/answers";\nexport const answers: Answers = '
    (tmp_path / "answers.ts").write_text(declared + answers.decode())
    config = {"extends": str(ROOT / "engine" / "view" / "tsconfig.json"), "include": ["answers.ts"]}
    (tmp_path / "tsconfig.json").write_text(json.dumps(config))
    done = subprocess.run([TSC, "--project", tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
