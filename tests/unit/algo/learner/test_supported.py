"""Models that cannot be trained, or would be trained wrong, are refused when they are loaded; others are taken."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from algo.learner.config import LearnerConfig
from algo.learner.model import supported
from algo.learner.model.attention import bounds, packed_attention, register
from algo.learner.model.context import check_heads
from algo.learner.model.scorer import Scorer
from engine.types import Batch
from tests.support.algo_gradients import build

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OF_GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
OTHER_NAMES = {
    "GPT2": OF_GPT2,
    "GPTJ": {**OF_GPT2, "rotary_dim": 4},
    "Bloom": {**OF_GPT2, "hidden_size": 16},
    "Falcon": {name: SIZES[name] for name in SIZES if name not in ("intermediate_size", "num_key_value_heads")},
    "OPT": {**SIZES, "ffn_dim": 16, "word_embed_proj_dim": 16},
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
LINEAR = dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2)
LINEAR |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "shared_expert_intermediate_size"), 8)
WINDOW = {"sliding_window": 8}
WINDOWED = {"Mistral": WINDOW, "Gemma3Text": {**WINDOW, "head_dim": 8}, "Phi3": WINDOW}
WITH_SINKS = {
    "GptOss": {**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8},
    "GraniteSWA": WINDOW,
}

REFUSED = {
    "Qwen3Next": ({**EXPERTS, **LINEAR, "head_dim": 8}, r"'qwen3_next' gives a trajectory in a row .* nats"),
    "GPT2": ({}, r"'gpt2' \(GPT2Model\) has no list 'layers'"),
    "Nemotron": ({}, r"NemotronAttention gives attention 'packed' no bounds .* LearnerConfig\(attention='sdpa'\)"),
}


def write(folder, family, **fields):
    """A random checkpoint of the family, with two layers of width 16."""
    config = getattr(transformers, f"{family}Config")(**{**OTHER_NAMES.get(family, SIZES), **fields})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
    return folder / family


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_cannot_be_trained_is_refused_when_it_is_loaded(group, tmp_path, family):
    fields, words = REFUSED[family]
    source = write(tmp_path, family, **fields)
    with pytest.raises(ValueError, match=words):
        build(source, tmp_path)


def rows(lengths):
    """Trajectories of which everything after the first two tokens was sampled."""
    rng = np.random.default_rng(0)
    return Batch(
        step=0,
        token_ids_N=rng.integers(3, 32, sum(lengths)).astype(np.int32),
        sampled_N=np.concatenate([np.arange(length) >= 2 for length in lengths]),
        logprobs_N=np.zeros(sum(lengths), np.float32),
        versions_N=np.full(sum(lengths), -1, np.int32),
        lengths_B=np.asarray(lengths, np.int32),
        advantages_B=np.ones(len(lengths), np.float32),
    )


@pytest.mark.parametrize("attention", ["packed", "sdpa"])
@pytest.mark.parametrize("family", WINDOWED)
def test_a_row_of_a_model_with_windows_is_scored_as_each_trajectory_alone(group, tmp_path, family, attention):
    check_scores(write(tmp_path, family, **WINDOWED[family]), tmp_path, attention)


@pytest.mark.parametrize("family", WITH_SINKS)
def test_a_row_of_a_model_with_sinks_is_scored_as_each_trajectory_alone(group, tmp_path, family):
    check_scores(write(tmp_path, family, **WITH_SINKS[family]), tmp_path, "packed")


def test_a_model_without_bounds_of_trajectories_is_scored_exactly_with_sdpa(group, tmp_path):
    check_scores(write(tmp_path, "Nemotron"), tmp_path, "sdpa")


def check_scores(source, folder, attention):
    """A row of several trajectories, one of them longer than two windows, against each alone in the bare model."""
    batch = rows((20, 7, 9, 5))
    subject = build(source, folder, attention=attention)
    found_N = subject.score(batch)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    ends = np.cumsum(batch.lengths_B)
    for start, end in zip(ends - batch.lengths_B, ends, strict=True):
        ids_T = torch.from_numpy(batch.token_ids_N[start:end].astype(np.int64))
        with torch.no_grad():
            logprobs_TV = model(ids_T[None]).logits[0].log_softmax(-1)
        alone_T = logprobs_TV[:-1].gather(-1, ids_T[1:, None]).squeeze(-1)[1:]
        np.testing.assert_allclose(found_N[start + 2 : end], alone_T.numpy(), rtol=0, atol=5e-6)
    assert np.isfinite(subject.train(batch)["loss"])


@pytest.mark.parametrize(
    "method", [{"quant_method": "mxfp4"}, {"quant_method": "fp8"}], ids=lambda each: each["quant_method"]
)
def test_quantised_weights_are_refused_before_and_when_they_are_read(group, tmp_path, method):
    source = write(tmp_path, "GptOss", **WITH_SINKS["GptOss"])
    fields = json.loads((source / "config.json").read_text()) | {"quantization_config": method}
    (source / "config.json").write_text(json.dumps(fields))
    words = rf"quantised \('{method['quant_method']}' in config\.json\).*Fix: write them in bfloat16 once"
    with pytest.raises(ValueError, match=words):
        LearnerConfig().check_model(fields)
    with pytest.raises(ValueError, match=words):
        build(source, tmp_path)


FIXED_ROPES = {
    "linear": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 8},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8},
}
ROPES_OF_THE_ROW = {
    "dynamic": ("Llama", {"factor": 2.0}),
    "longrope": ("Phi3", {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 8}),
}
SCORED_WRONG = {  # by other code than ours, each for a reason of its own
    "final logits are capped": ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 30.0}, "sdpa"),
    "logits are scaled": ("Cohere", {"logit_scale": 0.25}, "packed"),
    "logits are divided": ("Granite", {"logits_scaling": 2.0}, "packed"),
    "layers before the head": ("ModernBertDecoder", {}, "packed"),
    "layers before the head, dense mask": ("ModernBertDecoder", {}, "sdpa"),
    "attention of its own": ("GPTNeoXJapanese", {"intermediate_multiple_size": 2}, "packed"),
    "attention of its own, sinusoids": ("XGLM", {"d_model": 16, "ffn_dim": 16, "attention_heads": 2}, "packed"),
    "linear attention": ("Qwen3_5Text", {"layer_types": ["linear_attention", "full_attention"]}, "packed"),
    "convolutions": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "packed"),
    "state space": ("Mamba", {}, "packed"),
    "positions of the row": ("BioGpt", {}, "sdpa"),
}
SCORED_RIGHT = ("Llama", "Qwen2", "Qwen3", "Olmo2", "SmolLM3", "Starcoder2", "StableLm", "Phi")


@pytest.mark.parametrize("case", SCORED_WRONG)
def test_a_model_is_refused_that_scores_a_trajectory_of_a_row_otherwise_than_alone(group, tmp_path, case):
    family, fields, attention = SCORED_WRONG[case]
    source = write(tmp_path, family, **fields)
    with pytest.raises(ValueError, match=r"[0-9.e-]+ nats"):
        build(source, tmp_path, attention=attention)


@pytest.mark.parametrize("family", SCORED_RIGHT)
def test_a_model_that_scores_a_row_as_each_trajectory_alone_is_taken(group, tmp_path, family):
    build(write(tmp_path, family), tmp_path, attention="sdpa" if family == "StableLm" else "packed")


def test_what_goes_wrong_beyond_a_long_window_is_measured_with_few_tokens(group, tmp_path):
    source = write(tmp_path, "Mistral", sliding_window=4096)
    register()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)

    def without_window(model):
        model.config.sliding_window = None
        return Scorer(model)

    supported.check_scores(model, "packed", Scorer)
    with pytest.raises(ValueError, match="nats"):
        supported.check_scores(model, "packed", without_window)


def test_the_measurement_leaves_the_model_as_it_was(group, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write(tmp_path, "Mistral", sliding_window=12), dtype=torch.float32)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    register()
    supported.check_scores(model, "packed", Scorer)
    assert model.config.sliding_window == 12
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("rope", ROPES_OF_THE_ROW)
def test_rotary_embeddings_that_depend_on_the_longest_trajectory_are_refused(group, tmp_path, rope):
    family, fields = ROPES_OF_THE_ROW[rope]
    fields = {"rope_type": rope, "rope_theta": 1e4, **fields}
    source = write(tmp_path, family, rope_parameters=fields, original_max_position_embeddings=8)
    with pytest.raises(ValueError, match=f"rope_type '{rope}'"):
        build(source, tmp_path)


@pytest.mark.parametrize("rope", FIXED_ROPES)
def test_rotary_embeddings_with_fixed_frequencies_are_taken(group, tmp_path, rope):
    fields = {"rope_type": rope, "rope_theta": 1e4, **FIXED_ROPES[rope]}
    check_scores(write(tmp_path, "Llama", rope_parameters=fields), tmp_path, "packed")


def test_rotary_embeddings_of_one_kind_of_layer_are_looked_at_too(group, tmp_path):
    of_layers = {
        "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    source = write(tmp_path, "Gemma3Text", **WINDOWED["Gemma3Text"], rope_parameters=of_layers)
    with pytest.raises(ValueError, match="rope_type 'dynamic'"):
        build(source, tmp_path)


@pytest.mark.parametrize("family", ["Falcon", "GPTJ", "Bloom", "OPT"])
@pytest.mark.parametrize("attention", ["packed", "sdpa"])
def test_a_model_without_this_attention_is_refused_by_what_it_lacks(group, tmp_path, family, attention):
    with pytest.raises(ValueError, match="'layers'"):
        build(write(tmp_path, family), tmp_path, attention=attention)


def test_an_attention_that_a_model_cannot_be_built_with_is_refused_by_name(group, tmp_path):
    with pytest.raises(ValueError, match=r"'xglm' .*'sdpa' .*Fix"):
        build(write(tmp_path, "XGLM", d_model=16, ffn_dim=16, attention_heads=2), tmp_path, attention="sdpa")


def tied(folder, *, change):
    """A checkpoint with tied embeddings, whose file has a head all the same, changed or not."""
    source = write(folder, "Qwen3", head_dim=8, tie_word_embeddings=True)
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + change
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    return source


def test_a_tied_head_with_other_weights_in_the_file_is_refused_by_name(group, tmp_path):
    with pytest.raises(ValueError, match=r"tie_word_embeddings .*lm_head\.weight"):
        build(tied(tmp_path, change=0.1), tmp_path)


def test_a_tied_head_that_the_file_repeats_is_taken(group, tmp_path):
    check_scores(tied(tmp_path, change=0.0), tmp_path, "packed")


def test_packed_attention_refuses_what_it_would_leave_out():
    states = torch.zeros(1, 1, 3, 4)
    row = bounds([3], states.device)
    packed_attention(None, states, states, states, None, **row, dropout=0.0, softcap=None)
    with pytest.raises(ValueError, match=r"softcap.*'packed'"):
        packed_attention(None, states, states, states, None, **row, softcap=1.0)


def test_packed_attention_on_a_gpu_refuses_values_of_another_width():
    states = torch.zeros(1, 1, 3, 4, device="meta")
    row = bounds([3], torch.device("cpu"))
    with pytest.raises(ValueError, match=r"values of another width.*attention='sdpa'"):
        packed_attention(None, states, states, states[..., :2], None, **row)


@pytest.mark.parametrize(("mask", "window"), [(None, 2), (torch.tensor(2), None), (torch.tensor(2), 3)])
def test_packed_attention_refuses_a_layer_whose_mask_has_another_window(mask, window):
    states = torch.zeros(1, 1, 3, 4)
    row = bounds([3], states.device)
    with pytest.raises(ValueError, match=r"mask.*attention='sdpa'"):
        packed_attention(None, states, states, states, mask, **row, sliding_window=window)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_packed_attention_looks_back_as_far_as_the_window(length):
    states = torch.randn(3, 1, 2, length, 4, generator=torch.Generator().manual_seed(0))
    row = bounds([length], states.device)
    found, _ = packed_attention(None, *states, torch.tensor(4), **row, sliding_window=4)
    seen = torch.ones(length, length, dtype=torch.bool).tril().triu(-3)
    expected = torch.nn.functional.scaled_dot_product_attention(*states, attn_mask=seen)
    torch.testing.assert_close(found.transpose(1, 2), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [2, 3, 5, 9, None])
def test_what_comes_after_a_common_beginning_looks_back_into_it_as_far_as_the_window(window):
    states = torch.randn(3, 1, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    row = bounds([3, 0, 2], states.device, shared=4)  # trajectories of 7, 4 and 6 tokens
    mask = None if window is None else torch.tensor(window)
    found, _ = packed_attention(None, *states, mask, **row, sliding_window=window)
    for own in (range(4, 7), range(7, 9)):
        places = [*range(4), *own]
        alone, _ = packed_attention(
            None, *states[:, :, :, places], mask, **bounds([len(places)], states.device), sliding_window=window
        )
        torch.testing.assert_close(found[:, places], alone, rtol=1e-5, atol=1e-6)


def test_ranks_that_share_rows_must_divide_the_heads():
    check_heads(Qwen3Config(num_attention_heads=12), 4)
    with pytest.raises(
        ValueError, match=r"context_parallel must divide the 12 query heads .* got 8\. Fix: one of 1, 2"
    ):
        check_heads(Qwen3Config(num_attention_heads=12), 8)
