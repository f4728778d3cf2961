"""Weights from a real learner to real engines, by each transport that runs on the CPU: tests/support/weight_sync.py."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("shm", 1), id="shm", marks=pytest.mark.campaign),
        pytest.param(("gloo", 2), id="gloo", marks=pytest.mark.smoke),
    ],
)
def result(request):
    """Both ways, and both numbers of ranks, in one run each."""
    transfer, ranks = request.param
    command = [sys.executable, "-m", "tests.support.weight_sync", transfer, str(ranks)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1]) | {"transfer": transfer}


def test_weights_that_changed_are_those_of_the_learner(result):
    assert min(result["moved"]) > 1e-3, "else old weights would pass"
    assert result["canary_max_abs"] < 1e-5


def test_a_replica_that_is_killed_in_an_update_is_replaced_and_gets_the_weights(result):
    each = [[index, version] for index in (0, 1) for version in (0, 1, 2, 3)]
    assert result["given"] == each
    assert result["processes"] == 3


def test_a_replica_whose_update_failed_is_replaced_and_training_goes_on(result):
    assert "replica 0: weight update 4 failed" in result["broken"]
    assert result["replaced"] == [0, 3], "the version that is live"
    assert result["last"] == [[0, 4], [1, 4]]
    assert result["deaths"] == 2


def test_published_files_do_not_pile_up(result):
    files = ["weights-3.safetensors", "weights-4.safetensors"] if result["transfer"] == "shm" else []
    assert result["files"] == files


def test_each_token_across_an_update_is_said_to_be_of_the_version_that_sampled_it(result):
    (tokens_3, off_3), (tokens_4, off_4) = result["across"]["3"], result["across"]["4"]
    assert (tokens_3 >= 20, tokens_3 + tokens_4) == (True, 200)
    assert off_4 < 1e-3 < off_3


def test_the_canary_is_one_step(result):
    assert result["sent"] == [2], "both sequences are there before the engine begins"


def test_the_two_files_in_use_stay_mapped(result):
    assert result["mapped_anew"] == [True, True, False, False, True, False, True]


def test_neighbours_in_a_file_are_one_memory(result):
    """q, k and v are packed together, without a copy before."""
    assert result["neighbours_joined"]
