"""Mixtures of experts on two ranks, which do not divide the experts evenly, against transformers' own passes."""

import subprocess

import pytest
import torch

from tests.support import algo_mixtures as mixtures
from tests.support.algo_node import on_ranks
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return mixtures.write(tmp_path_factory.mktemp("source"), num_experts=3)


@pytest.fixture(scope="module")
def lopsided(tmp_path_factory):
    return mixtures.lopsided(tmp_path_factory.mktemp("lopsided"))


@pytest.fixture(scope="module")
def sinks(tmp_path_factory):
    return mixtures.write(tmp_path_factory.mktemp("sinks"), "GptOss", num_local_experts=3)


@pytest.fixture(scope="module")
def two_ranks(source, lopsided, sinks, tmp_path_factory):
    result = tmp_path_factory.mktemp("two") / "found.pt"
    command = on_ranks(2, "tests.support.algo_mixtures", source, lopsided, sinks, result)
    subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"}, check=True, timeout=300
    )
    return torch.load(result)


@pytest.mark.parametrize("case", mixtures.CASES)
def test_two_ranks_give_the_losses_gradients_and_weights_of_transformers(two_ranks, source, case):
    coef = mixtures.CASES[case].get("load_balancing_coef", 0.0)
    frozen = ("mlp.gate.weight",) if case == "frozen router" else ()
    mixtures.assert_equal(two_ranks[case], mixtures.by_transformers(source, coef=coef, frozen=frozen))


@pytest.mark.parametrize("case", mixtures.OF_SINKS)
def test_two_ranks_train_gpt_oss_as_transformers_does(two_ranks, sinks, case):
    coef = mixtures.CASES[case].get("load_balancing_coef", 0.0)
    mixtures.assert_equal(two_ranks[f"sinks, {case}"], mixtures.by_transformers(sinks, coef=coef))


def test_experts_that_no_rank_sends_a_token_to_have_a_gradient_of_zero(two_ranks, lopsided):
    mixtures.assert_equal(two_ranks["lopsided"], mixtures.by_transformers(lopsided))
    for part in ("gate_up_proj", "down_proj"):
        assert (two_ranks["lopsided"][2][f"model.layers.1.mlp.experts.{part}"][1:] == 0).all()
