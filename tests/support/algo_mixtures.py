"""Tiny random mixtures of experts, five steps of the learner on them, and the same steps by transformers alone.

It is a program too, which trains on several ranks: `algo_mixtures.py CHECKPOINT LOPSIDED SINKS RESULT`, where the
routers of the second checkpoint send every token to one expert, and the third is gpt-oss.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from algo.loss.policy_losses import PpoClip
from tests.support.algo_fakes import batch, with_prefix

SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHARED = {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
FAMILIES = {
    "Qwen3Moe": {**EXPERTS, "num_experts": 8, "head_dim": 8},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "Qwen2Moe": {**EXPERTS, "num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 24},
    "Glm4Moe": {**EXPERTS, **SHARED, "n_routed_experts": 8, "head_dim": 8, "use_qk_norm": True},
    "DeepseekV3": {**EXPERTS, **SHARED, **LATENT, "n_routed_experts": 8, "num_key_value_heads": 4},
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8},
}
HELD_OUT = {  # of other sizes than the support was written with
    "Qwen3Moe": {"num_experts": 5, "num_experts_per_tok": 3, "hidden_size": 48, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 3, "sliding_window": 8},
    "Qwen2Moe": {"num_experts": 7, "decoder_sparse_step": 2, "num_hidden_layers": 4},
    "Glm4Moe": {
        "n_routed_experts": 12,
        "n_group": 3,
        "topk_group": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 2,
    },
    "DeepseekV3": {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    "GptOss": {"num_local_experts": 5, "num_experts_per_tok": 3, "hidden_size": 48, "num_hidden_layers": 4},
}
STEPS = 5
LOSS = PpoClip(clip_low=1.0, clip_high=1e9, dual_clip=None)  # ratio times advantage, which has no steps
TRAIN = {
    "threads": 1,
    "loss": LOSS,
    "lr": 1e-3,
    "adam_eps": 1e-4,
    "warmup_steps": 0,
    "minibatches": 1,
    "grad_clip": 1e9,
}
CASES = {
    "plain": {},
    "small rows": {"micro_batch_tokens": 60},
    "checkpointing": {"activation_checkpointing": "full", "micro_batch_tokens": 200},
    "all but the MLP kept": {"activation_checkpointing": "attention", "micro_batch_tokens": 200},
    "products kept": {"activation_checkpointing": "selective", "micro_batch_tokens": 200},
    "offload": {"activation_checkpointing": "full", "activation_offload": True},
    "frozen router": {"train_router": False},
    "balanced": {"load_balancing_coef": 0.5},
    "balanced, small rows, checkpointing": {
        "load_balancing_coef": 0.5,
        "micro_batch_tokens": 60,
        "activation_checkpointing": "selective",
    },
}
OF_SINKS = ("small rows", "products kept", "balanced")  # what several ranks do with gpt-oss


def write(folder, family="Qwen3Moe", bias=None, **fields):
    """A random checkpoint: all weights, norms and biases too, so that none of them is left out unseen.

    bias: what corrects the choice of the first expert, in place of random numbers for all of them.
    """
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES.get(family, {}), **fields})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        for name, constant in model.named_buffers():
            if "correction_bias" in name:
                constant.copy_(0.2 * torch.randn_like(constant))
                if bias is not None:
                    constant.zero_()[0] = bias
    path = folder / family
    model.save_pretrained(path)
    return path


def lopsided(folder):
    """A mixture whose routers send every token to the first of 8 experts."""
    return write(folder, "Glm4Moe", bias=10.0, num_experts_per_tok=1, norm_topk_prob=False)


def batches(prefix=False):
    """One for each step. prefix: all trajectories of a step begin alike, so that a row has that once."""
    for step in range(STEPS):
        whole = batch(9, step=step)
        yield with_prefix(whole, [(7 * place) % 512 for place in range(70)]) if prefix else whole


def plain(source):
    return AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def routing_of(model, whole):
    """transformers' load-balancing value of the inputs of a batch, padded, and the routers' logits and masks."""
    ends = np.cumsum(whole.lengths_B)
    inputs = []
    for start, end in zip(ends - whole.lengths_B, ends, strict=True):
        last = np.flatnonzero(whole.sampled_N[start:end])[-1]
        inputs.append(torch.from_numpy(whole.token_ids_N[start : start + last]).long())
    ids = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(each)) for each in inputs], batch_first=True)
    outputs = model(ids, attention_mask=mask, output_router_logits=True)
    experts, chosen = outputs.router_logits[0].shape[-1], model.config.num_experts_per_tok
    return load_balancing_loss_func(outputs.router_logits, experts, chosen, mask), outputs.router_logits, mask


def loss_of(model, whole):
    """Minus the mean of ratio times advantage over the sampled tokens, with a forward pass for each trajectory."""
    total, ends = torch.zeros(()), np.cumsum(whole.lengths_B)
    for end, length, advantage in zip(ends, whole.lengths_B, whole.advantages_B, strict=True):
        ids = torch.from_numpy(whole.token_ids_N[end - length : end]).long()
        mask = torch.from_numpy(whole.sampled_N[end - length + 1 : end])
        old = torch.from_numpy(whole.logprobs_N[end - length + 1 : end])
        new = model(ids[None, :-1]).logits[0].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        total = total - ((new - old)[mask].exp() * advantage).sum()
    return total / int(whole.sampled_N.sum())


def by_transformers(source, *, coef=0.0, prefix=False, frozen=()):
    """(losses, load-balancing values, gradients of the last step by name, weights after it)."""
    model = plain(source)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.endswith(frozen))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    losses, values = [], []
    for whole in batches(prefix):
        optimizer.zero_grad()
        loss = loss_of(model, whole)
        if hasattr(model.config, "router_aux_loss_coef"):
            value, _, _ = routing_of(model, whole)
            loss = loss + coef * value
            values.append(value.item())
        loss.backward()
        losses.append(loss.item())
        gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        optimizer.step()
    return losses, values, gradients, {name: weight.detach() for name, weight in model.named_parameters()}


def by_the_learner(source, folder, *, prefix=False, **fields):
    """The same of the learner, on each rank."""
    from algo.learner.config import LearnerConfig
    from algo.learner.trainer import Trainer

    trainer = Trainer(LearnerConfig(**TRAIN | fields), source, [[1, 2, 3, 4, 5]], folder, seed=5)
    gradients = {}

    def keep(*_):
        for name, weight in trainer.scorer.named_parameters():
            if weight.requires_grad:
                gradients[name.removeprefix("model.")] = weight.grad.full_tensor().clone()

    trainer.optimizer.register_step_pre_hook(keep)
    steps = [trainer.train(whole) for whole in batches(prefix)]
    weights = {name.removeprefix("model."): whole_of(weight) for name, weight in trainer.scorer.named_parameters()}
    values = [step["load_balancing"] for step in steps]
    return [step["loss"] for step in steps], values, gradients, weights


def whole_of(weight):
    return weight.detach().full_tensor().clone()


def assert_equal(found, expected, gradients=5e-6):
    """Losses, load-balancing values and weights within 1e-6, gradients (sums that cancel out) within 5e-6."""
    for name in (0, 1):
        np.testing.assert_allclose(found[name], expected[name] or found[name], rtol=1e-6, atol=1e-6)
    for name, bound in ((2, gradients), (3, 1e-6)):
        assert found[name].keys() == expected[name].keys()
        for each, value in expected[name].items():
            assert (found[name][each] - value).norm() <= bound * value.norm(), each


if __name__ == "__main__":
    checkpoint, lopsided, sinks, result = map(Path, sys.argv[1:])
    from algo.learner.trainer import join_group

    join_group()
    found = {case: by_the_learner(checkpoint, result.parent, **fields) for case, fields in CASES.items()}
    found["lopsided"] = by_the_learner(lopsided, result.parent)
    found |= {f"sinks, {case}": by_the_learner(sinks, result.parent, **CASES[case]) for case in OF_SINKS}
    if dist.get_rank() == 0:
        torch.save(found, result)
    from algo.learner.learner import leave

    leave(0)
