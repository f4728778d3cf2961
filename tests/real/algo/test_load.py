"""How weights come to the ranks: rank 0 reads them, the others get their shards from it."""

import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.support.algo_node import on_ranks
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Two ranks load a model of 190 MB, whose embeddings are tied or not; (the model, what the ranks found)."""

    def load(tied):
        folder = tmp_path_factory.mktemp("load")
        config = Qwen3Config(
            vocab_size=4001,
            hidden_size=512,
            intermediate_size=2048,
            num_hidden_layers=11,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            tie_word_embeddings=tied,
        )
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder / "source")
        command = on_ranks(2, "tests.support.algo_load", folder / "source", folder / "found.pt")
        environment = {"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=200)
        return AutoModelForCausalLM.from_pretrained(folder / "source"), torch.load(folder / "found.pt")

    return load


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_that_did_not_read_the_weights_have_them_and_never_held_them_all(loaded, tied):
    model, found = loaded(tied)
    weights = dict(model.named_parameters())
    assert found["weights"].keys() == weights.keys()
    assert all(torch.equal(found["weights"][name], weight) for name, weight in weights.items())
    constants = dict(model.named_buffers(prefix="model"))
    assert constants
    for rank in found["ranks"]:
        assert rank["constants"].keys() == constants.keys()
        assert all(torch.equal(rank["constants"][name], constant) for name, constant in constants.items())
    ids_L = torch.arange(3, 10)
    with torch.no_grad():
        logprobs_LV = model(ids_L[None, :-1]).logits[0].log_softmax(-1)
    expected_L = logprobs_LV.gather(-1, ids_L[1:, None]).squeeze(-1)
    torch.testing.assert_close(found["logprobs"], expected_L, rtol=0, atol=1e-5)
    whole = sum(weight.nbytes for weight in weights.values())
    assert found["ranks"][0]["grown"] > 0.9 * whole, "the measure works"
    assert found["ranks"][1]["grown"] < 0.8 * whole
