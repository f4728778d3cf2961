"""Models that cannot be trained are refused when they are loaded, by name; those beside them are trained."""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM

from algo.learner.attention import bounds, packed_attention
from engine.types import Batch
from tests.support.algo_fakes import write_checkpoint
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
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
LOCAL_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
LINEAR = dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2)
LINEAR |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "shared_expert_intermediate_size"), 8)
WINDOW = {"sliding_window": 8}

REFUSED = {
    "Qwen3Moe": ({**EXPERTS, "head_dim": 8}, r"'qwen3_moe' is a mixture of experts \(model\.layers\.0\.mlp\.experts\)"),
    "Mixtral": (LOCAL_EXPERTS, "'mixtral' is a mixture of experts"),
    "Qwen3Next": ({**EXPERTS, **LINEAR, "head_dim": 8}, "'qwen3_next' is a mixture of experts"),
    "GptOss": (LOCAL_EXPERTS, "'gpt_oss' is a mixture of experts"),
    "Mistral": (WINDOW, r"'mistral' looks back 8 tokens .* LearnerConfig\(attention='sdpa'\)"),
    "Gemma3Text": (
        {**WINDOW, "head_dim": 8},
        r"'gemma3_text' looks back 8 tokens .* LearnerConfig\(attention='sdpa'\)",
    ),
    "Phi3": (WINDOW, r"'phi3' looks back 8 tokens .* LearnerConfig\(attention='sdpa'\)"),
    "GPT2": ({"n_embd": 16, "n_layer": 2, "n_head": 2}, r"'gpt2' \(GPT2Model\) has no list 'layers'"),
    "Nemotron": ({}, r"NemotronAttention gives attention 'packed' no bounds .* LearnerConfig\(attention='sdpa'\)"),
    "GPTNeoX": ({}, r"under other names .*, lm_head\.weight first.*'gpt_neox'"),
}


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def write(folder, family, **fields):
    """A random checkpoint of the family, with two layers of width 16."""
    of_gpt2 = ("vocab_size", "bos_token_id", "eos_token_id")
    sizes = {name: SIZES[name] for name in of_gpt2} if family == "GPT2" else SIZES
    config = getattr(transformers, f"{family}Config")(**sizes, **fields)
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


@pytest.mark.parametrize("family", ["Mistral", "Gemma3Text", "Phi3", "Nemotron"])
def test_what_packed_attention_cannot_do_sdpa_does_exactly(group, tmp_path, family):
    """A row of several trajectories, one of them longer than two windows, against each alone in the bare model."""
    source, batch = write(tmp_path, family, **REFUSED[family][0]), rows((20, 7, 5))
    subject = build(source, tmp_path, attention="sdpa")
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


@pytest.mark.parametrize("fields", [{"sliding_window": 64}, {"sliding_window": None}])
def test_a_window_that_no_trajectory_outgrows_is_no_window(group, tmp_path, fields):
    build(write(tmp_path, "Mistral", **fields), tmp_path)


def test_a_family_that_may_have_a_window_is_taken_where_no_layer_has_it(group, tmp_path):
    fields = {"sliding_window": 8, "use_sliding_window": False}
    build(write(tmp_path, "Qwen2", **fields), tmp_path)


@pytest.mark.parametrize("name", ["final_logit_softcapping", "logit_scale", "logits_scaling"])
def test_a_model_that_changes_its_logits_is_refused(group, tmp_path, name):
    source = write_checkpoint(tmp_path / "tiny")
    fields = json.loads((source / "config.json").read_text())
    for value in (None, 1.0):
        (source / "config.json").write_text(json.dumps(fields | {name: value}))
        build(source, tmp_path)
    (source / "config.json").write_text(json.dumps(fields | {name: 8.0}))
    with pytest.raises(ValueError, match=f"{name} changes the logits"):
        build(source, tmp_path)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("Qwen3_5Text", {"layer_types": ["linear_attention", "full_attention"]}),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    ],
)
def test_a_model_whose_layers_are_not_all_attention_is_refused(group, tmp_path, family, fields):
    """Linear attention and convolutions know no bounds in a row: a trajectory would begin where its neighbour ended."""
    source = write(tmp_path, family, **fields)
    with pytest.raises(ValueError, match=r"its model.layers.0.*conv.* would run on from one trajectory of a row into"):
        build(source, tmp_path)


@pytest.mark.parametrize(("name", "value"), [("softcap", 1.0), ("s_aux", torch.ones(1)), ("sliding_window", 2)])
def test_packed_attention_refuses_what_it_would_leave_out(name, value):
    states = torch.zeros(1, 1, 3, 4)
    row = bounds([3], states.device)
    packed_attention(None, states, states, states, None, **row, dropout=0.0, **{name: None})
    with pytest.raises(ValueError, match=f"needs {name}, which attention 'packed' does not have"):
        packed_attention(None, states, states, states, None, **row, **{name: value})
