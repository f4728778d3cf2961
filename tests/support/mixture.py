"""A random mixture of experts of a hundred thousand parameters, which vLLM serves on the CPU, and its own routes."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

LAYERS, EXPERTS, PER_TOKEN, VOCABULARY = 3, 8, 2, 512
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 4096}


def write_mixture(path: Path, seed: int = 0) -> Path:
    """Weights so large that no two experts are nearly equal to a token."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.0 if "embed" in name or "gate.weight" in name else 0.15)
    model.save_pretrained(path)
    return path


def write_gpt_oss(path: Path, seed: int = 0) -> Path:
    """gpt-oss, whose second layer alone sees all tokens, with sinks, biases and norms that are random too."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "gpt_oss",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        sliding_window=16,
        max_position_embeddings=8192,
        rope_parameters={**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(path)
    return path


def own_routes(path: Path, ids) -> np.ndarray:
    """The experts that transformers' model chooses for a sequence, [T, X, E]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    chosen = []
    for name, module in model.named_modules():
        if name.endswith(("mlp.gate", "mlp.router")):
            module.register_forward_hook(lambda _module, _given, output: chosen.append(output[2]))
    with torch.no_grad():
        model(torch.tensor([list(ids)]))
    return torch.stack(chosen, 1).numpy()


def differing(routes_TXE, others_TXE) -> list[int]:
    """Positions at which two routes name other experts in some layer, in whatever order."""
    different = np.sort(routes_TXE, -1) != np.sort(others_TXE, -1)
    return np.flatnonzero(different.any((1, 2))).tolist()
