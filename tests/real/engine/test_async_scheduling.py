"""Steps that are scheduled ahead, as on GPUs by default and never on CPUs: tests/support/async_scheduling.py."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def result():
    command = [sys.executable, "-m", "tests.support.async_scheduling"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_each_token_comes_once_and_is_said_to_be_of_the_version_that_sampled_it(result):
    assert result["ahead"]
    assert result["wrong"] == []
    assert result["versions"] > 2, "some requests were sampled by several versions"


def test_no_kv_block_stays_counted_when_requests_ended_or_were_left(result):
    assert result["used_blocks"] > 10
    assert (result["still_used"], result["still_running"]) == (0, 0)
