"""Writes and reads all that a learner needs to resume exactly where it was; writing goes on beside the training.

Invariants
- A checkpoint appears under its name complete or not at all: by a rename, when all of it is on the disk.
- The state is that of the call: what is trained afterwards is not in it. A failed write is raised by the next call.
- A checkpoint that is read runs no code (`algo.learner.state.checkpoint_reader`).
- Every rank calls these with equal arguments; each writes its own shards (torch.distributed.checkpoint). Any number of
  ranks may resume from them: a rank that did not exist before keeps the random numbers of its own seed.
- If ranks are on several hosts, a checkpoint is on rank 0's: the others send it what they wrote, and get what they
  read.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from algo.learner import hosts
from algo.learner.state.checkpoint_reader import Planner, Reader
from engine.atomic_files import sync_folder, write_synced

MANIFEST = "manifest.json"  # {file: [bytes, CRC-32]}; engine.run.checkpoints reads it
KEPT = 2


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written or read; the message names it and the cause."""


class Checkpoints:
    """Writes and reads the state of a model and its optimizer; one write at a time, in a thread.

    The thread has a process group of its own, so that its collectives never meet those of the training.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._group = dist.new_group(backend="gloo", timeout=timedelta(hours=1))
        self._stager = BlockingAsyncStager()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def write(self, path: Path, counters: dict[str, int]) -> None:
        """Starts a write and returns when the state is copied. counters: plain numbers that belong to it."""
        self.wait()
        state = self._stager.stage(self._state() | {"counters": counters})
        self._writing = self._thread.submit(self._write, state, path)

    def wait(self, *, to_end: bool = True) -> None:
        """Raises CheckpointFailed if the last write failed. to_end: waits until it is over; otherwise only looks."""
        writing = self._writing
        if writing is not None and (to_end or writing.done()):
            self._writing = None
            writing.result()

    def read(self, path: Path) -> dict[str, int]:
        """Restores model, optimizer and random numbers; returns the counters. Raises CheckpointFailed."""
        try:
            if hosts.several():
                hosts.spread(path, self._group)
            reader = Reader(hosts.folder_of(path))
            saved = reader.read_metadata().state_dict_metadata
            names = [name for name in saved if name.startswith("counters.")]
            state = self._state() | {"counters": {name.removeprefix("counters."): 0 for name in names}}
            for name in self._random.keys() - saved.keys():
                del state[name]
            dcp.load(state, storage_reader=reader, planner=Planner(), process_group=self._group)
            if hosts.several():
                dist.barrier(self._group)
                hosts.forget(path)
            saved_weights = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
            unknown = saved_weights - state["model"].keys()
            if unknown:  # torch.distributed.checkpoint would leave them out
                raise KeyError(f"the model has no {min(unknown)}")
        except (Exception, CheckpointException) as error:  # PyTorch's is a BaseException
            raise CheckpointFailed(f"cannot read checkpoint {path}: {_cause(error)}") from error
        weights, moments = state["model"], state["optimizer"]
        set_state_dict(self._model, self._optimizer, model_state_dict=weights, optim_state_dict=moments)
        for name in self._random.keys() & state.keys():
            self._random[name][1](state[name])
        return state["counters"]

    @property
    def _random(self) -> dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], None]]]:
        """Each random number generator of this rank: how its state is read, and set. CUDA's was not yet set."""
        generators = {f"random_{dist.get_rank()}": (torch.get_rng_state, torch.set_rng_state)}
        if next(self._model.parameters()).device.type == "cuda":
            generators[f"random_cuda_{dist.get_rank()}"] = (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
        return generators

    def _state(self) -> dict[str, Any]:
        new = not self._optimizer.state
        model, optimizer = get_state_dict(self._model, self._optimizer)
        for moments in self._optimizer.state.values() if new else ():
            moments["step"].zero_()  # a step that did not train made them
        return {"model": model, "optimizer": optimizer} | {name: get() for name, (get, _) in self._random.items()}

    def _write(self, state: dict[str, Any], path: Path) -> None:
        unfinished = path.parent / f".{path.name}"
        try:
            here = hosts.folder_of(unfinished)
            if hosts.first_of_its_host():
                shutil.rmtree(here, ignore_errors=True)
                here.mkdir(parents=True, exist_ok=True)  # another rank may have made it meanwhile
            dcp.save(state, storage_writer=dcp.FileSystemWriter(here), process_group=self._group)
            if hosts.several():
                hosts.collect(unfinished, self._group)
            if dist.get_rank() == 0:
                _finish(unfinished, path)
        except (Exception, CheckpointException) as error:  # PyTorch's is a BaseException
            # If a disk is full, PyTorch's message is about an unexpected position, so the free space is reported.
            free = shutil.disk_usage(next(folder for folder in path.absolute().parents if folder.is_dir())).free >> 20
            raise CheckpointFailed(f"cannot write checkpoint {path}: {_cause(error)}; {free} MiB are free") from error


def _finish(unfinished: Path, path: Path) -> None:
    """Describes the files, makes the checkpoint appear, and deletes all but the last two."""
    files = {file.name: [file.stat().st_size, _checksum(file)] for file in sorted(unfinished.iterdir())}
    write_synced(unfinished / MANIFEST, [json.dumps(files).encode()])
    sync_folder(unfinished)
    if path.exists():  # a resumed run writes some of them again
        shutil.rmtree(path)
    unfinished.rename(path)
    sync_folder(path.parent)
    for old in sorted(each for each in path.parent.glob("step-*") if each.name[5:].isdecimal())[:-KEPT]:
        shutil.rmtree(old)


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as content:
        while piece := content.read(1 << 24):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _cause(error: BaseException) -> str:
    """Returns the innermost cause in one line; after failures on several ranks, that of the first."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first, _) = min(error.failures.items())
        return f"rank {rank}: {_cause(first)}"
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return " ".join(f"{type(error).__name__}: {error}".split())
