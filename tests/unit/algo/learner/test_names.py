"""A mixture of experts leaves the learner as the files of its checkpoint have it: every family's own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Interleave, WeightConverter

from algo.learner.model.names import by_file, filed
from algo.learner.model.supported import check_names
from algo.learner.state.export import export
from algo.learner.state.publish import full_state, named_weights
from engine.nodes import deltas
from engine.nodes.messages import FileInfo
from tests.support.algo_fakes import batch
from tests.support.algo_gradients import build

SIZES = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTURES: dict[str, tuple[str, dict[str, Any], str]] = {  # class of the config, its fields, a tensor of its files
    "Qwen3-MoE": ("Qwen3Moe", {**ROUTED, "num_experts": 5}, "layers.1.mlp.experts.4.up_proj.weight"),
    "Qwen3-MoE, one dense layer": (
        "Qwen3Moe",
        {**ROUTED, "num_experts": 4, "mlp_only_layers": [1]},
        "layers.1.mlp.up_proj.weight",
    ),
    "Mixtral": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 2},
        "layers.2.block_sparse_moe.experts.2.w3.weight",
    ),
    "Qwen2-MoE": (
        "Qwen2Moe",
        {**ROUTED, "num_experts": 6, "shared_expert_intermediate_size": 20, "decoder_sparse_step": 1},
        "layers.0.mlp.shared_expert.gate_proj.weight",
    ),
    "OLMoE": (
        "Olmoe",
        {"num_experts": 3, "num_experts_per_tok": 2, "hidden_size": 32},
        "layers.0.mlp.experts.1.down_proj.weight",
    ),
    "gpt-oss": ("GptOss", {"num_local_experts": 3, "num_experts_per_tok": 2}, "layers.1.mlp.experts.gate_up_proj_bias"),
}


pytestmark = pytest.mark.usefixtures("group")


def write(folder: Path, family: str, **options: Any) -> Path:
    name, fields, _ = MIXTURES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**SIZES | fields))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder / "source", **options)
    return folder / "source"


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], each) for name, each in expected.items())


@pytest.mark.parametrize("family", MIXTURES)
def test_published_exported_and_saved_weights_are_those_of_the_files(tmp_path: Path, family: str) -> None:
    source = write(tmp_path, family)
    expected = load_file(source / "model.safetensors")
    assert any(name.endswith(MIXTURES[family][2]) for name in expected)
    trainer = build(source, tmp_path, weights_dtype="float32")
    export(trainer.scorer, source, tmp_path / "exported")
    assert same(full_state(trainer.scorer), expected)
    assert same(load_file(trainer.publisher.publish(1)), expected)
    assert same(load_file(tmp_path / "exported" / "model.safetensors"), expected)


def test_an_exported_mixture_computes_in_transformers_what_the_learner_computes(tmp_path: Path) -> None:
    source = write(tmp_path, "Qwen3-MoE")
    trainer = build(source, tmp_path)
    trainer.train(batch(8, vocabulary=48))
    export(trainer.scorer, source, tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).eval()
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    found = torch.from_numpy(trainer.score_canary())[:4]
    torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-5)


def test_adapters_on_attention_are_merged_and_experts_keep_their_names(tmp_path: Path) -> None:
    source = write(tmp_path, "Qwen3-MoE")
    expected = load_file(source / "model.safetensors")
    trainer = build(source, tmp_path, lora_rank=2, lora_targets=("q_proj", "o_proj"))
    found = full_state(trainer.scorer)
    changed = {name for name, weight in expected.items() if not torch.equal(found.pop(name), weight)}
    assert found == {}
    assert changed == {name for name in expected if name.endswith(("q_proj.weight", "o_proj.weight"))}


def test_the_tensors_of_one_weight_are_views_of_it(tmp_path: Path) -> None:
    trainer = build(write(tmp_path, "Mixtral"), tmp_path)
    own = {weight.to_local().untyped_storage().data_ptr() for weight in trainer.scorer.parameters()}
    assert {tensor.untyped_storage().data_ptr() for _, tensor in named_weights(trainer.scorer)} <= own


def test_a_run_that_is_resumed_has_the_weights_and_goes_on_as_the_one_before(tmp_path: Path) -> None:
    source = write(tmp_path, "Qwen3-MoE")
    first = build(source, tmp_path / "first")
    first.train(batch(8, step=1, vocabulary=48))
    first.checkpoint(tmp_path / "step-1", 1)
    first.checkpoints.wait()
    second = build(source, tmp_path / "second")
    assert not same(full_state(second.scorer), full_state(first.scorer))
    assert second.restore(tmp_path / "step-1") == 1
    for trainer in (first, second):
        trainer.train(batch(8, step=2, vocabulary=48))
    assert same(full_state(second.scorer), full_state(first.scorer))


def test_a_delta_between_two_versions_makes_the_newer_file(tmp_path: Path) -> None:
    trainer = build(write(tmp_path, "Qwen3-MoE"), tmp_path, weights_dtype="bfloat16", lr=1e-5)
    old = tmp_path / "old"
    old.hardlink_to(trainer.publisher.publish(0))
    trainer.train(batch(8, vocabulary=48))
    new = Path(trainer.publisher.publish(1))
    digest = deltas.write(old, new, tmp_path / "delta")
    assert digest is not None
    info = FileInfo(name="weights-1", size_bytes=new.stat().st_size, sha256=digest)
    deltas.apply(old, tmp_path / "delta", info, tmp_path / "made")
    assert same(load_file(tmp_path / "made"), load_file(new))


def test_files_that_hold_the_experts_together_are_refused_by_name(tmp_path: Path) -> None:
    source = write(tmp_path, "Qwen3-MoE", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(source / "model.safetensors")
    with pytest.raises(ValueError, match=r"other names .*layers\.0\.mlp\.experts\.0\.\w+\.weight first"):
        build(source, tmp_path)


def test_files_whose_experts_are_others_are_refused_by_name(tmp_path: Path) -> None:
    source = write(tmp_path, "Qwen3-MoE")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    check_names(model, source)
    weights = load_file(source / "model.safetensors")
    one, other = (f"model.layers.0.mlp.experts.{expert}.gate_proj.weight" for expert in (0, 1))
    weights[one], weights[other] = weights[other], weights[one]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"experts\.0\.gate_proj\.weight would leave with other values"):
        check_names(model, source)


def test_a_weight_that_is_no_collection_of_tensors_is_refused_by_name() -> None:
    """Its rows are interleaved in the files."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SIZES))
    model._weight_conversions = [
        WeightConverter(
            source_patterns="q_proj.weight", target_patterns="q_proj.weight", operations=[Interleave(dim=0)]
        )
    ]
    with pytest.raises(ValueError, match=r"q_proj\.weight is no collection"):
        filed(model)


def test_a_plain_model_keeps_its_names() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7, bias=False))
    found = dict(by_file(model, ((name, weight.detach()) for name, weight in model.named_parameters())))
    assert same(found, {name: weight.detach() for name, weight in model.named_parameters()})
