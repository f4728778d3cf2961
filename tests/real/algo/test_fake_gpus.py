"""What fit.py computes, against the learner's own code on fake GPUs (`tests.support.fake_learner`)."""

import pytest

from tests.support.fake_learner import Cell
from tests.support.memory_table import CELLS, compared, measure, measured

SELECTIVE = {"activation_checkpointing": "selective", "reference_kl_coef": 0.1}
FULL = {"activation_checkpointing": "full"}
ATTENTION_ALONE = {"lora_rank": 16, "lora_targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
AWAY = {"activation_offload": True, "offload_optimizer": True}
# Few layers, so that each takes seconds; other models and lengths than those of the table.
SHORT = [
    Cell(model="Qwen3-14B", ranks=8, tokens=12000, layers=5, learner=FULL),
    Cell(model="Qwen3-14B", ranks=4, tokens=9000, layers=3, learner={"activation_checkpointing": "attention"}),
    Cell(
        model="Qwen2.5-7B-Instruct", ranks=2, tokens=8000, layers=4, learner={"activation_checkpointing": "selective"}
    ),
    Cell(model="Qwen2.5-7B-Instruct", ranks=8, tokens=8000, layers=3, learner=FULL | {"lora_rank": 16}),
    Cell(
        model="Qwen3-14B",
        ranks=8,
        tokens=32000,
        layers=4,
        sampled=1.0,  # ranks that share a row otherwise have more or fewer targets than others
        learner={"activation_checkpointing": "attention", "context_parallel": 4},
    ),
    Cell(
        model="Qwen2.5-7B-Instruct",
        ranks=7,
        tokens=24001,
        layers=3,
        sampled=1.0,
        learner=FULL | {"activation_offload": True, "context_parallel": 7},
    ),
    Cell(model="Qwen3-1.7B", ranks=1, tokens=10000, layers=4, learner={}),
    Cell(model="Qwen3-30B-A3B", ranks=8, tokens=12000, layers=4, learner={}),
    Cell(model="Qwen3-30B-A3B", ranks=64, tokens=20000, layers=4, learner=FULL | {"train_router": False}),
    Cell(
        model="Qwen3-30B-A3B",
        ranks=8,
        tokens=32001,
        layers=4,
        sampled=1.0,
        learner={"activation_checkpointing": "attention", "context_parallel": 8},
    ),
    Cell(
        model="Qwen3-30B-A3B",
        ranks=8,
        tokens=32000,
        layers=4,
        sampled=1.0,
        learner={"activation_checkpointing": "selective", "context_parallel": 2, **ATTENTION_ALONE},
    ),
    Cell(
        model="Qwen2-57B-A14B",
        ranks=4,
        tokens=16000,
        layers=4,
        sampled=1.0,
        learner={"activation_checkpointing": "selective", "context_parallel": 4},
    ),
    Cell(
        model="Qwen2-57B-A14B", ranks=6, tokens=8000, layers=4, learner={"activation_checkpointing": "selective"}
    ),  # 64 experts, which six ranks do not divide
    Cell(model="Mixtral-8x7B", ranks=16, tokens=9000, layers=4, learner=FULL),  # fewer experts than ranks
    Cell(
        model="GLM-4.5-Air",
        ranks=8,
        tokens=8000,
        layers=4,
        learner={"activation_checkpointing": "attention", **ATTENTION_ALONE},
    ),
    Cell(model="gpt-oss-20b", ranks=8, tokens=9000, layers=4, learner={"activation_checkpointing": "selective"}),
    Cell(
        model="gpt-oss-120b",
        ranks=16,
        tokens=8000,
        layers=3,
        learner={"activation_checkpointing": "attention", **ATTENTION_ALONE},
    ),
    Cell(model="Qwen3-1.7B", ranks=1, tokens=10000, layers=3, learner=FULL | AWAY | {"fp32_head": True}),
]


@pytest.fixture(scope="module")
def rows():
    return measure(SHORT, timeout_s=300)


@pytest.mark.parametrize("index", range(len(SHORT)))
def test_what_fit_computes_is_what_the_learner_allocates_and_executes(rows, index):
    actual, fitted = compared(rows[index])
    assert fitted["load"] == pytest.approx(actual["load"], rel=0.02)
    assert fitted["train"] == pytest.approx(actual["train"], rel=0.07)
    assert fitted["publish"] == pytest.approx(actual["publish"], rel=0.1)
    assert fitted["needed"] == pytest.approx(actual["needed"], rel=0.01)
    assert fitted["executed"] == pytest.approx(actual["executed"], rel=0.02)


def test_activations_and_the_optimizer_are_in_host_memory_where_they_should_be(rows):
    cell, phases, parameters = rows[-1]["cell"], rows[-1]["phases"], rows[-1]["parameters"]
    assert phases["rest"]["now"] == pytest.approx(4 * parameters, rel=0.01), "weights alone stay"
    assert phases["rest"]["host"] == pytest.approx(8 * parameters, rel=0.01)
    activations, hidden = phases["train"]["host_peak"] - 8 * parameters, 2048 * cell["tokens"]
    assert 0 < activations - 2 * hidden * cell["layers"] < 12 * hidden, "layers' inputs, and what the last norm keeps"


@pytest.mark.campaign
def test_the_committed_measurements_are_those_of_the_learner():
    """Half an hour on two cores."""
    for now, then in zip(measure(CELLS, timeout_s=7200), measured(), strict=True):
        assert now["cell"] == then["cell"]
        for phase, sizes in now["phases"].items():
            assert sizes["peak"] == pytest.approx(then["phases"][phase]["peak"], rel=0.01), (now["cell"], phase)
        assert now["executed"] == then["executed"]
