"""Reads a run's folder for the page: rows of metrics as they come, configuration, summary, and the record.

Invariants
- Only files are read, and nothing is written or locked, so the run does not notice. `refresh` reads what is new.
- A damaged row is left out and named in `problems`. A last line without its end counts as not yet written.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from engine.recording.files import check_files
from engine.recording.reader import RecordedRun
from engine.run.run_folder import ENDED, checked_row

_FLOCK = "hhqqi"  # struct flock of Linux: type, whence, start, length, process


class NotARun(ValueError):
    """The folder holds no run. The message is one line that says why."""


class RunFiles:
    """The files of the run in folder `path`. Raises NotARun if there is none or its configuration cannot be read, and
    BadInput if one of the files is a pipe or the like.

    rows: those of metrics.jsonl, in order. epoch: grows when the rows were replaced instead of extended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recorded = RecordedRun(path)
        self.rows: list[dict[str, Any]] = []
        self._damaged: list[str] = []  # a line for each damaged row
        self._read_to = 0
        self._line = 0
        self._inode = 0
        self.epoch = 0
        if not path.is_dir():
            raise NotARun(f"{path} is no folder. Fix: name the folder of a run, such as runs/quickstart")
        if not (path / "metrics.jsonl").exists() and not (path / "config.json").exists():
            inside = [child.name for child in sorted(path.iterdir()) if (child / "metrics.jsonl").exists()][:4]
            fix = f"name a folder below it: {', '.join(inside)}" if inside else "name the folder of a run"
            raise NotARun(f"{path} is no run: it has neither metrics.jsonl nor config.json. Fix: {fix}")
        check_files(path)
        self.config: dict[str, Any] = read_json(path / "config.json") or {}
        self.refresh()

    @property
    def name(self) -> str:
        return name_of_run(self.path)

    @property
    def summary(self) -> dict[str, Any] | None:
        with suppress(NotARun):
            return read_json(self.path / "summary.json")
        return None

    @property
    def summary_fault(self) -> str | None:
        """Says why there is a summary that cannot be read; None if it can, or if there is none."""
        try:
            read_json(self.path / "summary.json")
        except NotARun as error:
            return str(error)
        return None

    @property
    def state(self) -> str:
        return state_of(self.path)

    @property
    def age_s(self) -> float:
        """Seconds since the newest row was written, or since the run began if there is none."""
        return age_of(self.path, began=not self.rows)

    @property
    def ended(self) -> str | None:
        """The line with which an error ended the run; None if there is none."""
        with suppress(OSError):
            return (self.path / ENDED).read_text(encoding="utf-8", errors="replace").strip() or None
        return None

    @property
    def problems(self) -> list[str]:
        """One line for each thing that is damaged or cannot be read."""
        faults = (self.recorded.fault, self.summary_fault)
        return [*(fault for fault in faults if fault is not None), *self._damaged]

    def refresh(self) -> None:
        """Reads the rows that were written since the last call, or all of them if a resumed run rewrote the file."""
        try:
            with (self.path / "metrics.jsonl").open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._read_to:
                    self.rows, self._damaged = [], []
                    self._read_to, self._line, self._inode = 0, 0, status.st_ino
                    self.epoch += 1
                if status.st_size == self._read_to:
                    return
                file.seek(self._read_to)
                whole, _, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            raise NotARun(f"{self.path / 'metrics.jsonl'} cannot be read: {error.strerror}") from error
        if not whole:
            return
        self._read_to += len(whole) + 1
        for line in whole.split(b"\n"):
            self._line += 1
            if not line:
                continue
            row = checked_row(line)
            if row is None:
                self._damaged.append(f"metrics.jsonl, line {self._line} is damaged and left out")
            else:
                self.rows.append(row)


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns what a file of a run holds; None if it is not there. Raises NotARun if it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise NotARun(f"{path} cannot be read: {cause}. Fix: name a run whose {path.name} is whole") from error


def name_of_run(path: Path) -> str:
    """Returns the folder's name. `stage-1` has its run's name before it, since alone it would say too little."""
    path = path.resolve()
    return f"{path.parent.name}/{path.name}" if path.name.startswith("stage-") else path.name


def state_of(path: Path) -> str:
    """Returns "running" if a process holds the folder, else "finished" if it has a summary, else "stopped"."""
    if _is_locked(path / "lock"):
        return "running"
    return "finished" if (path / "summary.json").exists() else "stopped"


def age_of(path: Path, *, began: bool = False) -> float:
    """Returns the seconds since the newest row was written. began: since the run began."""
    newest = path / ("config.json" if began else "metrics.jsonl")
    with suppress(OSError):
        return max(0.0, time.time() - newest.stat().st_mtime)
    return 0.0


def _is_locked(path: Path) -> bool:
    """Returns whether another process holds the lock. Trying to take it could keep a run from starting."""
    with suppress(OSError), path.open("rb") as file:
        query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, query))
        return bool(kind != fcntl.F_UNLCK)
    return False
