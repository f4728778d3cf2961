"""A real engine reports the experts that it chose. tests/support/routed_replica.py, in a process."""

import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.timeout(200)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_routes_of_an_engine_are_those_of_the_model_whatever_is_cached_or_updated(family):
    command = [sys.executable, "-m", "tests.support.routed_replica", family]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
