"""Weights leave the learner: published for the replicas, or exported as a Hugging Face checkpoint.

Invariants
- A published or saved file appears under its name complete or not at all.
- Every rank calls these with equal arguments (gathering is a collective); rank 0 writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from algo.lora import merged


class Publisher:
    """Writes what the replicas load. scorer: holds the model as `scorer.model`."""

    def __init__(self, scorer: nn.Module, weights_dir: Path) -> None:
        self.weights_dir = weights_dir
        self._scorer = scorer
        self._published: list[Path] = []

    def publish(self, version: int) -> Path:
        """Writes the full fp32 weights for the replicas; keeps this file and the one before it."""
        path = self.weights_dir / f"weights-{version}.safetensors"
        state = full_state(self._scorer)
        if dist.get_rank() == 0:
            with appearing(path) as unfinished:
                save_file(state, unfinished)
            self._published.append(path)
            if len(self._published) > 2:
                self._published.pop(0).unlink(missing_ok=True)
        return path


def export(scorer: nn.Module, source: Path, path: Path) -> None:
    """A Hugging Face checkpoint in the dtype of the source, with the source's config and tokenizer files.

    An existing checkpoint at path is replaced at the end. Raises OSError or SafetensorError.
    """
    dtype = AutoConfig.from_pretrained(source).dtype or torch.float32
    state = {name: tensor.to(dtype) for name, tensor in full_state(scorer).items()}
    if dist.get_rank() == 0:
        with appearing(path) as unfinished:
            unfinished.mkdir()
            for file in source.iterdir():
                if file.suffix in (".json", ".jinja", ".txt", ".model") and "index" not in file.name:
                    shutil.copy(file, unfinished)
            save_file(state, unfinished / "model.safetensors", metadata={"format": "pt"})


def full_state(scorer: nn.Module) -> dict[str, Tensor]:
    """Unsharded weights under their Hugging Face names, adapters merged; a tied head is left out, as there."""
    return {name.removeprefix("model."): weight for name, weight in merged(scorer, _full)}


def _full(weight: Tensor) -> Tensor:
    """The whole of a parameter; it is no DTensor while it is gathered after a forward pass."""
    weight = weight.detach()
    if isinstance(weight, DTensor):
        weight = weight.to_local() if weight.device_mesh.size() == 1 else weight.full_tensor()
    return weight.contiguous()


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Where to write a file or folder that shall be at path when it is complete; nothing is left of one that failed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent, ignore_cleanup_errors=True) as folder:
        unfinished = Path(folder, "new")
        yield unfinished
        if path.is_dir():  # the one thing that a rename does not replace
            path.rename(Path(folder, "old"))
        unfinished.rename(path)
