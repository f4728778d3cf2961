"""Turns a published adapter into the folder that vLLM loads. Imports nothing heavy.

The learner publishes one safetensors file with peft's settings in its header (`algo.learner.state.publish`), so that
adapters travel to other hosts as weights do.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


def peft_folder(file: Path) -> Path:
    """Makes the folder beside a published adapter, with the file names that peft uses, and returns it.

    Raises ValueError if the file holds no adapter, OSError if it cannot be read or the folder cannot be made.
    """
    with file.open("rb") as opened:
        header = opened.read(int.from_bytes(opened.read(8), "little"))
    try:
        settings = json.loads(header)["__metadata__"]["peft"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{file} holds no adapter. Fix: weight_transfer must be the same in learner and replica"
        ) from None
    folder = file.with_suffix(".peft")
    folder.mkdir(exist_ok=True)
    for name, make in (
        ("adapter_config.json", lambda path: path.write_text(settings)),
        ("adapter_model.safetensors", lambda path: path.symlink_to(file.resolve())),
    ):
        temporary = folder / f".{name}-{os.getpid()}"  # other replicas of this host may write the same folder now
        temporary.unlink(missing_ok=True)
        make(temporary)
        temporary.replace(folder / name)
    return folder
