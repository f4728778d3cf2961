"""Runs with one fault each, of real replicas, jails, learner and weight transfer: the sentence says which it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.view.diagnosis import diagnose
from engine.view.step_window import Limit
from tests.support.limited_runs import OPTIONS
from tests.support.paths import ROOT
from tests.support.runs import metrics

LIMITS = {"healthy": Limit.NONE, "dead": Limit.DEAD_REPLICA}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", OPTIONS)
def test_the_sentence_names_the_fault(fault: str, tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "tests" / "support" / "limited_runs.py"), fault, f"runs={tmp_path}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=380, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / fault
    found = diagnose(metrics(folder), json.loads((folder / "config.json").read_text()))
    assert found.limit == (LIMITS.get(fault) or Limit(fault)), found
    assert found.sentence in done.stdout, "the report says so too"
