"""Mixtures of experts from a real learner to a real engine, by shm and gloo: tests/support/moe_sync.py."""

import json
import subprocess
import sys

import pytest

from tests.support.algo_mixtures import write
from tests.support.mixture import write_gpt_oss
from tests.support.paths import ROOT

pytestmark = pytest.mark.timeout(400)


TINY, GPT_OSS = "recipes/tiny/agent_moe", "gpt-oss"
# Sizes for which vLLM has kernels on the CPU: heads of 32, experts of a multiple of 32.
SIZES = {
    "Glm4Moe": {"moe_intermediate_size": 32, "head_dim": 32, "hidden_size": 64, "first_k_dense_replace": 1},
    "Mixtral": {"head_dim": 32, "hidden_size": 64, "intermediate_size": 64},
    "Qwen2Moe": {"moe_intermediate_size": 32, "hidden_size": 128},
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((TINY, "shm", 1), id="tiny-shm"),
        pytest.param((TINY, "gloo", 2), id="tiny-gloo", marks=pytest.mark.campaign),
        pytest.param(("Glm4Moe", "shm", 1), id="Glm4Moe"),
        pytest.param(("Mixtral", "shm", 1), id="Mixtral", marks=pytest.mark.campaign),
        pytest.param(("Qwen2Moe", "gloo", 1), id="Qwen2Moe", marks=pytest.mark.campaign),
        pytest.param((GPT_OSS, "shm", 1), id="gpt-oss-shm"),
        pytest.param((GPT_OSS, "gloo", 2), id="gpt-oss-gloo", marks=pytest.mark.campaign),
    ],
)
def result(request, tmp_path_factory):
    source, transfer, ranks = request.param
    checkpoint = source if source == TINY else written(source, tmp_path_factory.mktemp("model"))
    command = [sys.executable, "-m", "tests.support.moe_sync", str(checkpoint), transfer, str(ranks)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1]) | {"source": source, "transfer": transfer}


def written(source, folder):
    return write_gpt_oss(folder) if source == GPT_OSS else write(folder, source, **SIZES[source])


def test_weights_that_changed_are_those_of_the_learner(result):
    assert min(result["moved"]) > 1e-3, "else old weights would pass"
    assert result["canary_max_abs"] < 1e-4


def test_the_canary_of_each_version_reaches_the_experts(result):
    """A router with a large bias for other experts leaves one out of reach, which the metric says."""
    assert max(result["unreached"]) <= (1 if result["source"] == "Glm4Moe" else 0)
    assert min(result["further"]) > 0, "the fixed sequences do not"


def test_an_expert_that_is_wrong_on_the_replica_fails_the_canary(result):
    if result["transfer"] != "shm":
        pytest.skip("what gloo hands on cannot be changed on the way")
    assert result["noticed"] == [0, 3]


def test_an_engine_that_reads_the_exported_checkpoint_computes_what_the_learner_does(result):
    """The export has the dtype of the checkpoint that the learner began with."""
    in_bfloat16 = result["source"] == TINY
    assert result["dtype"] == ("bfloat16" if in_bfloat16 else "float32")
    assert result["exported"] < (0.05 if in_bfloat16 else 1e-5)
