"""What an engine says of the tokens that it has sampled, one at a time and in bundles.

tests/support/sampled_logprobs.py, in a process.
"""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.support.paths import ROOT
from tests.support.sampled_logprobs import TOKENS, WAYS

pytestmark = pytest.mark.timeout(200)  # mostly to start the engine


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, "-m", "tests.support.sampled_logprobs"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", WAYS)
def test_each_token_has_the_log_probability_that_the_engine_scores_it_with(found, way):
    assert [len(part) for part in found[way]["logprobs"]] == found[way]["tokens"]
    assert sum(found[way]["tokens"]) == TOKENS
    logprobs = [logprob for part in found[way]["logprobs"] for logprob in part]
    np.testing.assert_allclose(logprobs, found[way]["scored"], atol=1e-4)


def test_a_turn_that_nobody_wants_early_comes_whole(found):
    """After its first token, which says that the prompt was read. A busy reader gets several bundles as one."""
    assert found["whole"]["tokens"] in ([1, TOKENS - 1], [TOKENS])
    assert len(found["single"]["tokens"]) > len(found["whole"]["tokens"])
