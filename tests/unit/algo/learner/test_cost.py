"""The operations that MFU counts, against those that PyTorch counts of the model's own passes."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from algo.learner.config import LearnerConfig
from algo.learner.measure.flops import cost_of
from algo.learner.model.experts import freeze_routers, mixture_of
from algo.learner.model.lora import add_adapters

TOKENS = 24
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MODELS = {
    "qwen3": {"intermediate_size": 80},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 80},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 3, "intermediate_size": 40},
    "qwen2_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 56,
        "intermediate_size": 80,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "intermediate_size": 80,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24},
}


def small(kind):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **COMMON, **MODELS[kind])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")


def counted(model):
    """Returns what PyTorch counts of a forward and a backward pass in which the embeddings' gradient is wanted too."""
    embedded = model.get_input_embeddings()(torch.arange(TOKENS)[None]).detach().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def needed(model):
    """Returns the same by the cost; plain attention computes all of the square, and the cost counts half of it."""
    cost = cost_of(model)
    return replace(cost, square=2 * cost.square).of(targets=TOKENS, lengths=[TOKENS])


@pytest.mark.parametrize("kind", MODELS)
def test_all_operations_of_training_all_weights_are_counted(kind):
    model = small(kind)
    assert needed(model) == counted(model)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "qwen3"])
def test_a_frozen_router_has_no_gradient_of_its_own(kind):
    model = small(kind)
    before = needed(model)
    freeze_routers(model, LearnerConfig(train_router=False))
    assert needed(model) == counted(model)
    assert before - needed(model) == 2 * TOKENS * 32 * sum(layer.count for layer in mixture_of(model))


@pytest.mark.parametrize("kind", MODELS)
def test_adapters_of_attention_leave_frozen_weights_without_gradients(kind):
    model = small(kind)
    add_adapters(model, LearnerConfig(lora_rank=4, lora_targets=("q_proj", "k_proj", "v_proj", "o_proj")))
    assert needed(model) == counted(model)
