"""Makes a model of real size for a machine that has none: random weights, with the tiny agent's tokenizer.

python -m bench.benches.gpu.model FOLDER qwen3-1.7b|30b-a3b-4l|small|small-moe
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from bench.benches.shapes import fields_of
from recipes.tiny.task import SHIPPED

CHAT = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def model_at(folder: Path, shape: str) -> Path:
    """Returns the folder with such a model, which a process of its own makes if it is not there."""
    if not (folder / "config.json").is_file():
        subprocess.run([sys.executable, "-m", __name__, str(folder), shape], check=True)
    return folder


def write(folder: Path, shape: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    agent = AutoConfig.from_pretrained(SHIPPED)
    config = AutoConfig.for_model(
        **fields_of(shape),
        vocab_size=agent.vocab_size,
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
