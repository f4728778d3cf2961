"""Ranks that share rows make of them what one rank does: the update, the metrics, and whatever is scored."""

import subprocess

import numpy as np
import pytest
import torch

from tests.support.algo_context import CASES, FEW, write_checkpoints
from tests.support.algo_node import on_ranks
from tests.support.paths import ROOT

ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"}
# Of each: the ranks, and how many of them share a row.
GROUPS = [(2, 2), (4, 2), (4, 4)]
RUNS = [(ranks, sharing, case) for ranks, sharing in GROUPS for case in (CASES if ranks == 2 else FEW)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By (ranks, sharing): what they found. The processes run one after another."""
    folder = tmp_path_factory.mktemp("context")
    write_checkpoints(folder)
    found = {}
    for ranks, sharing in [(1, 1), *GROUPS]:
        result = folder / f"{ranks}-{sharing}.pt"
        command = on_ranks(ranks, "tests.support.algo_context", folder, result, sharing)
        subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, timeout=300, check=True)
        found[ranks, sharing] = torch.load(result)
    return found


def close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("ranks", "sharing", "case"), RUNS)
def test_gradients_and_weights_after_five_steps_are_those_of_one_rank(results, ranks, sharing, case):
    shared, alone = results[ranks, sharing][case], results[1, 1][case]
    close(shared["gradients"], alone["gradients"])
    close(shared["weights"], alone["weights"])


@pytest.mark.parametrize(("ranks", "sharing", "case"), RUNS)
def test_the_metrics_are_those_of_one_rank_but_for_the_filler(results, ranks, sharing, case):
    for shared, alone in zip(results[ranks, sharing][case]["metrics"], results[1, 1][case]["metrics"], strict=True):
        assert shared.keys() == alone.keys()
        for name in shared.keys() - {"padding_waste"}:
            assert shared[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6), name
        assert shared["padding_waste"] >= alone["padding_waste"]


@pytest.mark.parametrize(("ranks", "sharing", "case"), RUNS)
def test_notes_scores_and_the_canary_are_whole_and_in_order(results, ranks, sharing, case):
    shared, alone = results[ranks, sharing][case], results[1, 1][case]
    for name, tensor in alone["notes"].items():
        torch.testing.assert_close(shared["notes"][name], tensor, rtol=1e-6, atol=2e-6, equal_nan=True)
    for name in ("scores", "canary"):
        torch.testing.assert_close(shared[name], alone[name], rtol=0, atol=2e-6)
    assert shared["canary's sequences"] == alone["canary's sequences"]
    assert np.count_nonzero(alone["scores"]) > (100 if case != "mixture, one trajectory" else 0)


def test_experts_that_positions_of_one_rank_alone_are_sent_to_are_among_the_cases(results):
    first, second = map(set, results[2, 2]["mixture, one trajectory"]["experts"])
    assert first ^ second


def test_a_part_of_the_routes_is_the_models_own_so_that_their_share_says_something(results):
    for case in ("mixture, replay", "mixture, routes compared"):
        metrics = results[1, 1][case]["metrics"][0]
        assert 0.1 < metrics["routing_differs"] < 0.95
        assert 0.1 < metrics["routing_unknown"] < 0.3
