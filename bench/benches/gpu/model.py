"""Makes a model of real size for a machine that has none: random weights, with the tiny agent's tokenizer.

python -m bench.benches.gpu.model FOLDER qwen3-1.7b|30b-a3b-4l|small|small-moe
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from recipes.tiny.task import SHIPPED

SHAPES = {  # hidden, layers, heads, key heads, width of a head, inner
    "qwen3-1.7b": (2048, 28, 16, 8, 128, 6144),
    "30b-a3b-4l": (2048, 4, 32, 4, 128, 6144),  # Qwen3-30B-A3B with 4 of its 48 layers
    "small": (128, 2, 4, 2, 32, 256),
    "small-moe": (128, 2, 4, 2, 32, 256),
}
EXPERTS = {  # of a layer, of a token, and their width
    "30b-a3b-4l": (128, 8, 768),
    "small-moe": (8, 2, 64),
}
CHAT = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def model_at(folder: Path, shape: str) -> Path:
    """Returns the folder with such a model, which a process of its own makes if it is not there."""
    if not (folder / "config.json").is_file():
        subprocess.run([sys.executable, "-m", __name__, str(folder), shape], check=True)
    return folder


def write(folder: Path, shape: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hidden, layers, heads, key_heads, width, inner = SHAPES[shape]
    agent = AutoConfig.from_pretrained(SHIPPED)
    kind, experts = "qwen3", {}
    if shape in EXPERTS:
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        kind, experts = "qwen3_moe", dict(zip(names, EXPERTS[shape], strict=True))
    config = AutoConfig.for_model(
        kind,
        **experts,
        vocab_size=agent.vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=width,
        intermediate_size=inner,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
        eos_token_id=agent.eos_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    half_made = folder.with_name(f"{folder.name}.new")
    model.to(torch.bfloat16).save_pretrained(half_made)
    for name in CHAT:
        if (SHIPPED / name).is_file():
            shutil.copy(SHIPPED / name, half_made)
    half_made.rename(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
