"""Both halves of "nccl" between a learner and replicas of two workers, without a GPU: tests/support/nccl_pull.py."""

import json
import subprocess
import sys

import pytest

from tests.support.nccl_pull import GONE_S
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def result():
    command = [sys.executable, "-m", "tests.support.nccl_pull"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1]) | {"stderr": run.stderr}


def test_a_replica_pulls_as_one_group_with_a_rank_for_each_worker(result):
    assert result["members"] == [[0, 3], [1, 3], [2, 3]]
    assert result["both"] == [True, True], "each worker has all weights, and takes its part of them"


def test_a_worker_that_dies_in_a_pull_harms_no_other_replica_and_holds_the_next_version_up_for_a_time(result):
    assert result["beside_a_dying_one"] == [True, True]
    assert GONE_S - 0.5 < result["waited_s"] < GONE_S + 10
    assert "the replica did not take it in time" in result["stderr"]
    assert result["next"] == [True, True]
