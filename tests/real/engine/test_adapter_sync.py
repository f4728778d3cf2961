"""Adapters from a real learner to real engines on the CPU: tests/support/adapter_sync.py."""

import json
import subprocess
import sys

import pytest

from tests.support.adapter_sync import TOKENS
from tests.support.paths import ROOT

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, "-m", "tests.support.adapter_sync"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(("request_", "version"), [("across", 0), ("new", 1), ("old", 0)])
def test_a_request_is_sampled_by_its_own_version_beside_others(found, request_, version):
    told = found[request_]
    assert told["spans"] == [[version, 0, TOKENS]]
    assert told["own"] < 1e-4 < 1e-3 < told["other"], "else the other version would pass"


def test_an_update_pauses_nothing(found):
    assert not found["ended_before_update"]
    assert found["pauses"] == 0


def test_an_adapter_goes_when_newer_ones_came_and_nothing_uses_it(found):
    assert found["while_used"] == [1, 2, 3]
    assert found["kept"] == [[1, 0, TOKENS]]
    assert found["at_last"] == [3, 4]


def test_a_trajectory_whose_version_is_gone_goes_on_under_the_newest_and_says_so(found):
    assert found["gone"] == [[4, 0, TOKENS]]


def test_adapters_are_the_learners_and_small(found):
    assert found["canary_max_abs"] < 3e-5, "rounding: another version is 5 away"
    assert found["bytes"] < 400_000
    assert [name for name in found["files"] if name.endswith("safetensors")] == [
        "weights-3.safetensors",
        "weights-4.safetensors",
    ]
    assert len(found["files"]) == 4, "and a folder for each"


def test_a_replica_that_is_replaced_gets_the_adapter_and_weights_that_are_none_are_refused(found):
    assert found["replaced"] == [4]
    assert "weight update 5 failed" in found["broken"]
    assert "model.safetensors holds no adapter" in found["broken"]
