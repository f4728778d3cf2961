"""A published adapter as the folder that vLLM loads. Imports nothing heavy.

The learner publishes one safetensors file with peft's settings in its header (`algo.learner.state.publish`), so that
adapters travel to other hosts the way that weights do.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


def peft_folder(file: Path) -> Path:
    """The folder beside a published adapter that names it as peft does; made if it is not there.

    Raises ValueError for a file that holds no adapter, OSError where it cannot be read or the folder not be made.
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
        beside = folder / f".{name}-{os.getpid()}"  # other replicas of this host do the same
        beside.unlink(missing_ok=True)
        make(beside)
        beside.replace(folder / name)
    return folder
