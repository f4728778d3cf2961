"""A mixture of experts from a real learner to a real engine, by shm and gloo: tests/support/moe_sync.py."""

import json
import subprocess
import sys

import pytest

from tests.support.mixture import write_gpt_oss
from tests.support.paths import ROOT

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("shm", 1, "agent_moe"), id="shm"),
        pytest.param(("gloo", 2, "agent_moe"), id="gloo", marks=pytest.mark.campaign),
        pytest.param(("shm", 1, "gpt-oss"), id="gpt-oss"),
        pytest.param(("gloo", 2, "gpt-oss"), id="gpt-oss by gloo", marks=pytest.mark.campaign),
    ],
)
def result(request, tmp_path_factory):
    transfer, ranks, model = request.param
    tiny = "recipes/tiny/agent_moe" if model == "agent_moe" else write_gpt_oss(tmp_path_factory.mktemp("gpt-oss"))
    command = [sys.executable, "-m", "tests.support.moe_sync", transfer, str(ranks), str(tiny)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1]) | {"transfer": transfer, "model": model}


def test_weights_that_changed_are_those_of_the_learner(result):
    assert min(result["moved"]) > 1e-3, "else old weights would pass"
    assert result["canary_max_abs"] < 1e-4


def test_the_canary_of_each_version_reaches_all_experts(result):
    assert result["unreached"] == [0.0, 0.0]
    assert min(result["further"]) > 0, "the fixed sequences do not"


def test_an_expert_that_is_wrong_on_the_replica_fails_the_canary(result):
    if result["transfer"] != "shm":
        pytest.skip("what gloo hands on cannot be changed on the way")
    assert result["noticed"] == [0, 5]


def test_an_engine_that_reads_the_exported_checkpoint_computes_what_the_learner_does(result):
    """The export is in the checkpoint's dtype."""
    dtype, bound = ("bfloat16", 0.05) if result["model"] == "agent_moe" else ("float32", 1e-4)
    assert result["dtype"] == dtype
    assert result["exported"] < bound
