"""Adapters from a real learner to real engines on the CPU: tests/support/adapter_sync.py."""

import json
import subprocess
import sys

import pytest

from tests.support.adapter_sync import TOKENS
from tests.support.paths import ROOT

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def result():
    command = [sys.executable, "-m", "tests.support.adapter_sync"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(("request_", "version"), [("across", 0), ("new", 1), ("old", 0)])
def test_a_request_is_sampled_by_its_own_version_beside_others(result, request_, version):
    told = result[request_]
    assert told["spans"] == [[version, 0, TOKENS]]
    assert told["own"] < 1e-4 < 1e-3 < told["other"], "else the other version would pass"


def test_an_update_pauses_nothing(result):
    assert not result["ended_before_update"]
    assert result["pauses"] == 0


def test_an_adapter_goes_when_newer_ones_came_and_nothing_uses_it(result):
    assert result["while_used"] == [1, 2, 3]
    assert result["kept"] == [[1, 0, TOKENS]]
    assert result["at_last"] == [3, 4]


def test_a_trajectory_whose_version_is_gone_goes_on_under_the_newest_and_says_so(result):
    assert result["gone"] == [[4, 0, TOKENS]]


def test_adapters_are_the_learners_and_small(result):
    assert result["canary_max_abs"] < 3e-5, "rounding: another version is 5 away"
    assert result["bytes"] < 400_000
    assert [name for name in result["files"] if name.endswith("safetensors")] == [
        "weights-3.safetensors",
        "weights-4.safetensors",
    ]
    assert len(result["files"]) == 4, "and a folder for each"


def test_a_replica_that_is_replaced_gets_the_adapter_and_weights_that_are_none_are_refused(result):
    assert result["replaced"] == [4]
    assert "weight update 5 failed" in result["broken"]
    assert "model.safetensors holds no adapter" in result["broken"]
