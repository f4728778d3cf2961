"""The bench of the loop with real vLLM engines: all modes generate the same, and no engine step is lost."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.timeout(200)  # mostly to start two engines


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loop")
    shape = ["rounds=1", "replicas=2", "concurrent=128", "trajectories=128", "tokens=40", "turns=3", "step_s=0.005"]
    command = [sys.executable, "-m", "bench", "loop", *shape, f"json={folder}/r.json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads((folder / "r.json").read_text())


def test_bare_engines_generate_what_was_rolled_out(result):
    rolled, bare, sparse = (result["figures"][mode] for mode in ("rollouts", "bare", "sparse"))
    assert rolled["turns"] == bare["turns"] == 384
    assert sparse["turns"] == 48
    assert rolled["tokens"] == bare["tokens"]


def test_every_step_is_reported_for(result):
    """A trajectory takes a step for each of its tokens at least, and tokens of one step belong to several."""
    for mode in ("rollouts", "sparse", "bare"):
        figures = result["figures"][mode]
        assert 1 < figures["step_tokens"] <= 64
    assert result["figures"]["sparse"]["step_tokens"] < 8
