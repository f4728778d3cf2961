"""Weights that become FP8 when a replica receives them: tests/support/fp8_reload.py. No FP8 kernel of a GPU is run."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

ROUNDING = 2.0**-4  # the largest relative error of a rounding to FP8 (e4m3)


@pytest.mark.parametrize("kind", ["fp8_per_channel", pytest.param("fp8_per_tensor", marks=pytest.mark.campaign)])
def test_a_quantised_model_takes_new_weights_in_place_whenever_they_come(kind):
    command = [sys.executable, "-m", "tests.support.fp8_reload", kind]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["layers"] == 12, "all linear layers of the three; embedding and head stay as they are"
    assert max(result["before"], result["after"]) < ROUNDING < 0.3 < result["stale"], "old weights would not pass"
    assert result["moved"] == [], "a GPU's graphs keep the addresses"
    assert result["embedding"]
