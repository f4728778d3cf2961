"""A real engine scores sequences. tests/support/scoring.py, in a process."""

import subprocess
import sys

import pytest

from tests.support.paths import ROOT


def run(what):
    command = [sys.executable, "-m", "tests.support.scoring", what]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("what", ["cached", "killed"])
def test_scores_do_not_depend_on_what_else_is_computed_or_cached_or_killed(what):
    ended = run(what)
    assert ended.returncode == 0, ended.stderr[-4000:]
