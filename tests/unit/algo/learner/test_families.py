"""Every family of models that the recipes train, against transformers' own forward and backward pass.

The models are tiny and random: all weights, norms and biases too, so that none of them is left out unseen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from algo.learner.state.export import export
from algo.learner.state.publish import full_state
from algo.learner.trainer import Trainer
from tests.support.algo_gradients import build

SIZES = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LOCAL_AND_GLOBAL = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {  # class of the config, its fields, a weight that is its own
    "Qwen3": ("Qwen3", {"tie_word_embeddings": True}, "self_attn.q_norm.weight"),
    "Qwen3 with a head": ("Qwen3", {"tie_word_embeddings": False}, "lm_head.weight"),
    "Qwen2.5": ("Qwen2", {"head_dim": 6, "tie_word_embeddings": False}, "self_attn.q_proj.bias"),
    "Llama": ("Llama", {"tie_word_embeddings": False}, "lm_head.weight"),
    "SmolLM2": ("Llama", {"tie_word_embeddings": True}, "mlp.down_proj.weight"),
    "Gemma 3": (
        "Gemma3Text",
        {
            "sliding_window": 5,
            "layer_types": LOCAL_AND_GLOBAL,
            "query_pre_attn_scalar": 12,
            "tie_word_embeddings": True,
        },
        "pre_feedforward_layernorm.weight",
    ),
}
LENGTHS = (17, 4, 11)  # of trajectories in one row; the first is longer than three windows


pytestmark = pytest.mark.usefixtures("group")


def write(folder: Path, family: str) -> Path:
    name, fields, _ = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**SIZES | fields))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder / "source")
    return folder / "source"


def plain(source: Path) -> PreTrainedModel:
    """transformers' model with transformers' own attention."""
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, SIZES["vocab_size"], (length,), generator=generator) for length in LENGTHS]


def gradient_of_plain_rows(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    """log p of all tokens but the first ones, a forward pass a sequence, and the gradient of their sum by name."""
    found = []
    for ids in sequences():
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
        found.append(logprobs[:-1].gather(-1, ids[1:, None]).squeeze(-1))
    torch.cat(found).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return torch.cat(found).detach(), gradients


def logprobs_of_one_packed_row(trainer: Trainer) -> Tensor:
    """The same log-probabilities, all sequences side by side in one row of the learner."""
    inputs = [ids[:-1] for ids in sequences()]
    lengths = [len(ids) for ids in inputs]
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    targets = torch.cat([ids[1:] for ids in sequences()])
    positions = np.arange(len(targets))
    logprobs, _ = trainer.scorer(torch.cat(inputs)[None], position_ids[None], lengths, positions, targets)
    return logprobs


@pytest.mark.parametrize("fields", [{}, {"activation_checkpointing": "selective"}, {"attention": "sdpa"}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_has_the_log_probabilities_and_gradients_of_plain_rows(
    tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    source = write(tmp_path, family)
    expected, expected_gradients = gradient_of_plain_rows(plain(source))
    trainer = build(source, tmp_path, **fields)
    found = logprobs_of_one_packed_row(trainer)
    found.sum().backward()
    gradients = {
        name.removeprefix("model."): weight.grad.full_tensor() for name, weight in trainer.scorer.named_parameters()
    }
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, f"{name} is part of the model"
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_leave_for_the_replicas_under_the_names_and_with_the_values_of_the_checkpoint(
    tmp_path: Path, family: str
) -> None:
    source = write(tmp_path, family)
    filed = load_file(source / "model.safetensors")
    assert any(name.endswith(FAMILIES[family][2]) for name in filed)
    trainer = build(source, tmp_path, weights_dtype="float32")
    published = load_file(trainer.publisher.publish(1))
    export(trainer.scorer, source, tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for found in (full_state(trainer.scorer), published, exported):
        assert found.keys() == filed.keys()
        assert all(torch.equal(found[name], weight) for name, weight in filed.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_merged_into_what_is_exported(tmp_path: Path, family: str) -> None:
    """transformers' plain model of the export computes what the learner with its adapters does."""
    source = write(tmp_path, family)
    trainer = build(source, tmp_path, lora_rank=4)
    export(trainer.scorer, source, tmp_path / "exported")
    before, _ = gradient_of_plain_rows(plain(source))
    exported, _ = gradient_of_plain_rows(plain(tmp_path / "exported"))
    with torch.no_grad():
        found = logprobs_of_one_packed_row(trainer)
    torch.testing.assert_close(found, exported, rtol=0, atol=1e-5)
    assert (exported - before).abs().max() > 1e-3, "the adapters are not zero"
