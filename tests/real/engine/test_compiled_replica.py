"""Adapters on a replica whose model is compiled, as on a GPU: tests/support/compiled_replica.py."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.timeout(400)


def test_a_compiled_replica_serves_without_an_adapter_and_then_with_one():
    command = [sys.executable, "-m", "tests.support.compiled_replica"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["mode"] == 2, "Dynamo, without guards"
    assert (len(found["bare"]), len(found["adapted"])) == (4, 4)
