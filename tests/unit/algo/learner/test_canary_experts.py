"""The canary of a mixture of experts: each expert has a token that shows it, or the learner names the expert."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from algo.learner.config import LearnerConfig
from algo.learner.trainer import Trainer
from engine.fleet.canary import CanaryFailed, compare, tolerance_of
from engine.types import UNCOMPARED, PublishedWeights
from tests.support.algo_fakes import batch

LAYERS, EXPERTS = 3, 6
FIXED = [[1, 2, 3], [7]]
ROUTER = "model.layers.1.mlp.gate.weight"


pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def with_router(source: Path, rows: torch.Tensor) -> Path:
    """The checkpoint with another router in layer 1. rows: [EXPERTS, hidden size]."""
    weights = load_file(source / "model.safetensors")
    assert weights[ROUTER].shape == rows.shape
    save_file(weights | {ROUTER: rows.contiguous()}, source / "model.safetensors", metadata={"format": "pt"})
    return source


def build(source: Path, folder: Path) -> Trainer:
    return Trainer(LearnerConfig(threads=1, lr=1e-3), source, FIXED, folder, seed=5)


def opposites(size: int) -> torch.Tensor:
    """A router that never takes the last expert: of the others, two always have a positive logit, and it has 0."""
    one, other = torch.randn(2, size, generator=torch.Generator().manual_seed(1))
    return torch.stack([one, -one, other, -other, one + other, torch.zeros(size)])


@torch.no_grad()
def replica(source: Path, sequences: list[list[int]], broken: str = "") -> np.ndarray:
    """Log-probabilities [tokens] by transformers' own model, without one tensor of the checkpoint's files."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    if broken:
        layer, expert, part = broken.split()
        experts = model.model.layers[int(layer)].mlp.experts
        getattr(experts, part)[int(expert)].zero_()
    parts = []
    for ids in sequences:
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        parts.append(logprobs.gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1))
    return torch.cat(parts).numpy()


def test_an_expert_that_is_wrong_on_a_replica_fails_the_canary_whichever_it_is(source: Path, tmp_path: Path) -> None:
    trainer = build(source, tmp_path)
    weights = PublishedWeights("", 0, trainer.score_canary(), trainer.canary.further)
    assert trainer.canary.gaps == ""
    assert trainer.canary.metrics == {"canary_unreached": 0.0}
    sequences = [FIXED[0], *trainer.canary.further]
    tolerance = tolerance_of(source, "float32")
    assert compare(0, replica(source, sequences), weights, tolerance).mean_abs < tolerance / 2
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for part in ("gate_up_proj", "down_proj"):
                with pytest.raises(CanaryFailed):
                    compare(0, replica(source, sequences, f"{layer} {expert} {part}"), weights, tolerance)


def test_the_fixed_sequences_alone_would_not_reach_all_experts(source: Path, tmp_path: Path) -> None:
    trainer = build(source, tmp_path)
    trainer.score_canary()
    assert trainer.canary.further
    assert all(0 <= token < 64 for ids in trainer.canary.further for token in ids)


def test_an_expert_that_no_token_is_sent_to_is_named_and_not_sought_at_each_step(source: Path, tmp_path: Path) -> None:
    trainer = build(with_router(source, opposites(32)), tmp_path)
    trainer.score_canary()
    assert "1 of 18 (expert 5 of layer 1)" in trainer.canary.gaps
    assert trainer.canary.metrics == {"canary_unreached": 1.0}
    passes = []
    trainer.canary.scorer.model.register_forward_hook(lambda *_: passes.append(1))
    trainer.canary.scorer.model.base_model.register_forward_hook(lambda *_: passes.append(1))
    before = trainer.canary.further
    trainer.score_canary()
    assert (len(passes), trainer.canary.further) == (1, before)


def test_a_token_that_rounding_may_send_elsewhere_is_not_compared(source: Path, tmp_path: Path) -> None:
    """Two experts of layer 1 score alike: for a token that takes one of them, and all after it, either is right."""
    rows = opposites(32)
    rows[1] = rows[0]
    trainer = build(with_router(source, rows), tmp_path)
    scored = trainer.score_canary()
    assert (scored == UNCOMPARED).any()
    found = np.where(scored == UNCOMPARED, -3.0, scored)
    compare(0, found.astype(np.float32), PublishedWeights("", 0, scored), 1e-6)
    with pytest.raises(CanaryFailed):
        compare(0, (found - 0.1).astype(np.float32), PublishedWeights("", 0, scored), 1e-6)


def test_a_resumed_run_has_the_canary_of_the_one_before(source: Path, tmp_path: Path) -> None:
    first = build(with_router(source, opposites(32)), tmp_path / "first")
    first.score_canary()
    first.train(batch(8, step=1, vocabulary=64))
    expected = first.score_canary()
    first.checkpoint(tmp_path / "step-1", 1)
    first.checkpoints.wait()
    second = build(source, tmp_path / "second")
    second.restore(tmp_path / "step-1")
    assert np.array_equal(second.score_canary(), expected)
    assert second.canary.further == first.canary.further
    assert second.canary.unreached == first.canary.unreached != set()


def test_a_dense_model_has_the_fixed_sequences_alone(tmp_path: Path) -> None:
    trainer = build(Path("recipes/tiny/agent"), tmp_path)
    assert len(trainer.score_canary()) == 2
    assert (trainer.canary.further, trainer.canary.metrics, trainer.canary.gaps) == ([], {}, "")
