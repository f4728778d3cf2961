"""The learner's half of weight transfer: where published weights lie, and how replicas reach them.

    shm   two files on a memory file system, used in turn: replicas map them (`engine.replica.weight_transfer`)
    adapter  the same with the adapter of a LoRA run alone, which replicas load beside those of other versions
    gloo  memory of this process: each replica pulls it over a connection of its own
          (`engine.replica.weight_transfer_gloo`)

Between GPUs there is nccl (`algo.weights.transport_gpu`); `algo.learner.state.publish.transport` picks one.

Invariants
- What a replica reads is one version, whole: the file of a version that is overwritten loses its name first.
- Memory is written again and again, not made anew: its pages cost more than the copy.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from algo.weights.layout import PULL_S, Layout, Pulled


class Silent:
    """The transport of a rank that only helps to gather."""

    @contextmanager
    def writing(self, version: int) -> Iterator[dict[str, Tensor]]:
        yield {}

    def address(self, version: int) -> str:
        return ""


class Shm:
    """Publishes Safetensors files `weights-VERSION.safetensors`, the last two. One with a second hard link stays.

    peft: settings of the adapter, if the weights are one. An adapter may be read for longer than two versions, so its
    files are made anew instead of written again.
    """

    def __init__(self, folder: Path, layout: Layout, peft: str = "") -> None:
        self._folder, self._layout, self._peft = folder, layout, peft
        self._files: list[tuple[Path, dict[str, Tensor]]] = []  # the older one first
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def writing(self, version: int) -> Iterator[dict[str, Tensor]]:
        hidden = self._folder / f".weights-{version}"
        if len(self._files) < 2:
            views = self._create(hidden)
        else:
            path, views = self._files.pop(0)
            if self._peft or path.stat().st_nlink > 1:  # somebody keeps this version under another name
                path.unlink()
                shutil.rmtree(path.with_suffix(".peft"), ignore_errors=True)  # made by the replicas
                views = self._create(hidden)
            else:
                path.rename(hidden)
        yield views
        path = Path(self.address(version))
        hidden.rename(path)
        self._files.append((path, views))

    def address(self, version: int) -> str:
        return str(self._folder / f"weights-{version}.safetensors")

    def _create(self, path: Path) -> dict[str, Tensor]:
        header = self._header()
        size = len(header) + self._layout.size_bytes
        with path.open("wb") as file:
            # A full file system is an OSError here, and would be a SIGBUS later
            os.posix_fallocate(file.fileno(), 0, size)
            file.write(header)
        memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        return self._layout.views(memory[len(header) :])

    def _header(self) -> bytes:
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[self._layout.dtype]
        entries = {
            name: {"dtype": dtype, "shape": self._layout.shapes[name], "data_offsets": [start, end]}
            for name, start, end in self._layout.spans()
        }
        about = {"format": "pt"} | ({"peft": self._peft} if self._peft else {})
        text = json.dumps({"__metadata__": about, **entries}).encode()
        text += b" " * (-(len(text) + 8) % 64)  # weights begin at a cache line
        return len(text).to_bytes(8, "little") + text


class Gloo(Pulled):
    scheme = "gloo"

    def __init__(self, layout: Layout, folder: Path) -> None:
        super().__init__(layout, folder)

    @contextmanager
    def _joined(self, store: dist.Store, members: int) -> Iterator[Callable[[Tensor], Any]]:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=PULL_S)
        group = dist.ProcessGroupGloo(store, 0, members, options)
        yield lambda memory: group.send([memory], 1, 0).wait()
        store.get("done")  # the connection is held until everything was received
