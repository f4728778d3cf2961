"""Writes a trained model as a Hugging Face folder that stands alone: weights, configuration, tokenizer, chat template.

Invariants
- The folder appears under its name complete or not at all.
- A chat template that is given is the only one in the folder.
- Generation ends at the end-of-turn token that is given, and at the source's own end tokens, which ended turns in
  training too.
- Every rank calls `export` with equal arguments (gathering is a collective); rank 0 writes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig

from algo.learner.state.publish import full_state
from engine.atomic_files import atomic_path

# Files that are copied with the weights. Other files of a checkpoint (how it was made, say) are not true of what was
# trained from it.
JSON_FILES = (
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)


def export(
    scorer: nn.Module,
    source: Path,
    path: Path,
    *,
    chat_template: str | None = None,
    end_of_turn: int | None = None,
) -> None:
    """Writes a Hugging Face checkpoint in the dtype of the source, with the source's config and tokenizer files.

    An existing checkpoint at path is replaced at the end.

    chat_template: the Jinja text that the run used in place of the source's; None: the source's own.
    end_of_turn: the token that ends a turn of the template; None: generation ends as the source's does.

    Raises OSError or SafetensorError.
    """
    dtype = AutoConfig.from_pretrained(source, trust_remote_code=False).dtype or torch.float32
    state = full_state(scorer, dtype)
    if dist.get_rank() == 0:
        with atomic_path(path) as unfinished:
            unfinished.mkdir()
            for file in source.iterdir():
                if file.name in JSON_FILES or file.suffix in (".jinja", ".txt", ".model"):
                    shutil.copy(file, unfinished)
            if chat_template is not None:
                _replace_chat_template(unfinished, chat_template)
            if end_of_turn is not None:
                _end_generation_at(unfinished, end_of_turn)
            save_file(state, unfinished / "model.safetensors", metadata={"format": "pt"})
            # The library lets only the owner read the file; others may read it like the rest.
            shutil.copymode(unfinished / "config.json", unfinished / "model.safetensors")


def _replace_chat_template(folder: Path, chat_template: str) -> None:
    """Writes the only template: with several, the program that reads them would choose one."""
    for old in (*folder.glob("*.jinja"), folder / "chat_template.json"):
        old.unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    _write_json(path, {**_read_json(path), "chat_template": chat_template})


def _end_generation_at(folder: Path, end_of_turn: int) -> None:
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    own = generation.get("eos_token_id", _read_json(folder / "config.json").get("eos_token_id"))
    ends = [token for token in (own if isinstance(own, list) else [own]) if token is not None]
    if end_of_turn not in ends:
        ends.insert(0, end_of_turn)
    _write_json(path, {**generation, "eos_token_id": ends if len(ends) > 1 else end_of_turn})


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
