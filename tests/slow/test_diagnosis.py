"""Runs with one fault each, of real replicas, jails, learner and weight transfer: the sentence says which it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.diagnosis.limit import Diagnosis, diagnose
from engine.diagnosis.step_window import Limit
from tests.support.limited_runs import OPTIONS
from tests.support.paths import ROOT
from tests.support.runs import metrics

LIMITS = {"healthy": Limit.NONE, "dead": Limit.DEAD_REPLICA}


@pytest.mark.campaign
@pytest.mark.timeout(800)
@pytest.mark.parametrize("fault", OPTIONS)
def test_the_sentence_names_the_fault(fault: str, tmp_path: Path) -> None:
    """In one of two runs: on a machine that others use, what they do may be the larger fault."""
    wanted = LIMITS.get(fault) or Limit(fault)
    found = diagnosed(fault, tmp_path / "first")
    if found.limit != wanted:
        found = diagnosed(fault, tmp_path / "second")
    assert found.limit == wanted, found


def diagnosed(fault: str, runs: Path) -> Diagnosis:
    words = [sys.executable, str(ROOT / "tests" / "support" / "limited_runs.py"), fault, f"runs={runs}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=380, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = diagnose(metrics(runs / fault), json.loads((runs / fault / "config.json").read_text()), ended=True)
    assert found.sentence in done.stdout, "the report says so too"
    return found
