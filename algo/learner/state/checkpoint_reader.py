"""Reads a distributed checkpoint of PyTorch without running code that somebody put there.

PyTorch describes a checkpoint in a pickle, `.metadata`, and keeps what is not a tensor as further pickles; it loads
both with all rights of the process.

Invariants
- What is unpickled can name the classes of the description and plain values, nothing that calls or imports.
- Only files of the checkpoint's own folder are read.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_CLASSES = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_FILES, "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
_PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}  # Python 3.13 writes the second name


class NotACheckpoint(ValueError):
    """The file does not hold the description of a checkpoint; the message names it."""


class Reader(dcp.FileSystemReader):
    """Reads a checkpoint's folder as PyTorch's reader does, but unpickles only known classes."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Returns the description. Raises NotACheckpoint, OSError, or what pickle raises for bytes that are none."""
        file = Path(self.path) / ".metadata"
        with file.open("rb") as content:
            metadata = _Unpickler(content, file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise NotACheckpoint(f"{file} describes no checkpoint")
        for info in metadata.storage_data.values():
            name = info.relative_path
            if not isinstance(name, str) or Path(name).name != name:
                raise NotACheckpoint(f"{file} names the file {name!r}, which is not one of its folder")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: io.BufferedReader, file: Path) -> None:
        super().__init__(content)
        self._file = file

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class that the pickle names. Raises NotACheckpoint for any that a description does not need."""
        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        if (module, name) in _PATHS:
            return PosixPath
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise NotACheckpoint(
            f"{self._file} names {module}.{name}, which no description of a checkpoint does: it could run code here. "
            "Fix: use checkpoints of your own runs"
        )


class Planner(DefaultLoadPlanner):
    """Plans as PyTorch's planner does, but also unpickles everything that is not a tensor as plain values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Reads a plain value. Raises pickle.UnpicklingError for anything else."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
