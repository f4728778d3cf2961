"""pass@k and pass^k against the peers."""

import pytest

from algo.eval_stats import pass_at_k, pass_hat_k
from tests.support.golden import over, rows


@over(rows("pass_at_k", definition="unbiased"))
def test_pass_at_k_matches_golden(row):
    inputs = row["inputs"]
    ours = pass_at_k(inputs["n"], inputs["c"], inputs["k"])
    assert ours == pytest.approx(row["outputs"]["value"], rel=1e-9, abs=1e-9)


@over(rows("pass_at_k", definition="unbiased_pass_and_pass_hat_powers_of_2"))
def test_pass_at_and_hat_k_match_golden(row):
    rewards = row["inputs"]["rewards"]
    for key, theirs in row["outputs"].items():
        function = {"pass@": pass_at_k, "pass^": pass_hat_k}[key[:5]]
        ours = function(len(rewards), sum(reward > 0 for reward in rewards), int(key[5:]))
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-12)
