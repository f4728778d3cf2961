"""Finds the runs below a folder, also those that begin later, and says in a row how each is.

Invariants
- Only files are read, and of a run's metrics only what has come since the last look, the newest TAIL_BYTES at most.
- A search is bounded: DEPTH folders deep, FOLDERS of them, and FOUND runs, the newest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import metric_names as metric
from engine.run.run_folder import checked_row
from engine.view.run_files import NotARun, age_of, name_of_run, read_json, state_of

DEPTH = 4
FOLDERS = 20_000
FOUND = 500
TAIL_BYTES = 1 << 20


def is_run(path: Path) -> bool:
    """Returns whether a folder is that of a run that has begun. A model has a config.json too, but no metrics."""
    return (path / "metrics.jsonl").is_file() and (path / "config.json").is_file()


def runs_below(roots: Sequence[Path]) -> list[Path]:
    """Returns the runs in these folders, the one that wrote last first; a root may be a run itself."""
    folders: dict[Path, Path] = {}
    for root in roots:
        for path in _below(root):
            folders.setdefault(path.resolve(), path)  # the shortest path, where links lead to a run too
    return sorted(folders.values(), key=_written_at, reverse=True)[:FOUND]


def _below(root: Path) -> Iterator[Path]:
    level, seen = [root], 0
    for _ in range(DEPTH + 1):
        following: list[Path] = []
        for folder in level:
            if is_run(folder):
                yield folder
            following += _inside(folder, stages_only=is_run(folder))
            seen += 1
            if seen == FOLDERS:
                return
        level = following


def _inside(folder: Path, *, stages_only: bool) -> list[Path]:
    """Returns the folders in which runs may be: in a run only those of its stages."""
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(
            Path(entry.path)
            for entry in entries
            if entry.is_dir() and entry.name.startswith("stage-" if stages_only else "") and entry.name[0] != "."
        )
    return []


def _written_at(path: Path) -> float:
    with suppress(OSError):
        return (path / "metrics.jsonl").stat().st_mtime
    return 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """What was read of a run's metrics. size, inode: of the file then. accuracy: the newest of an evaluation.

    fault: why its configuration cannot be read; "" if it can.
    """

    size: int
    inode: int
    step: int
    accuracy: float | None
    steps: int | None
    recipe: str
    fault: str


class RunList:
    """The runs below `roots`, each as a row."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [*roots]
        self._looks: dict[Path, _Look] = {}

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each run, the one that wrote last first. accuracy: None if none was measured lately.

        fault: why a run cannot be opened; "" if it can.
        """
        return [self._row(path) for path in runs_below(self.roots)]

    def _row(self, path: Path) -> dict[str, Any]:
        look = self._looks[path] = _look(path, self._looks.get(path))
        return {
            "path": str(path),
            "name": name_of_run(path),
            "state": state_of(path),
            "age_s": age_of(path),
            "step": look.step,
            "steps": look.steps,
            "accuracy": look.accuracy,
            "recipe": look.recipe,
            "fault": look.fault,
        }


def _look(path: Path, before: _Look | None) -> _Look:
    """Reads what has come since the look before."""
    try:
        with (path / "metrics.jsonl").open("rb") as file:
            status = os.fstat(file.fileno())
            if before and not before.fault and (before.size, before.inode) == (status.st_size, status.st_ino):
                return before
            same = before is not None and before.inode == status.st_ino and before.size <= status.st_size
            begin = max(before.size if before is not None and same else 0, status.st_size - TAIL_BYTES)
            file.seek(begin)
            lines = file.read(TAIL_BYTES).split(b"\n")
    except OSError:
        return before or _Look(size=-1, inode=-1, step=0, accuracy=None, steps=None, recipe="", fault="")
    rows = [row for line in lines if line and (row := checked_row(line)) is not None]  # the first line may be torn
    step = max((int(row["step"]) for row in rows), default=before.step if same and before else 0)
    accuracies = [row[metric.EVAL_ACCURACY] for row in rows if metric.EVAL_ACCURACY in row]
    config, fault = _config(path)
    return _Look(
        size=begin + sum(map(len, lines)) + len(lines) - 1 - len(lines[-1]),  # a last line without its end comes again
        inode=status.st_ino,
        step=step,
        accuracy=accuracies[-1] if accuracies else before.accuracy if same and before else None,
        steps=config.get("steps") if isinstance(config.get("steps"), int) else None,
        recipe=_recipe(config),
        fault=fault,
    )


def _config(path: Path) -> tuple[dict[str, Any], str]:
    """Returns a run's configuration, and why it cannot be read; "" if it can."""
    try:
        return (read_json(path / "config.json") or {}) if (path / "config.json").is_file() else {}, ""
    except NotARun as error:
        return {}, str(error)


def _recipe(config: dict[str, Any]) -> str:
    """Returns the file that was run, as it was given; "" if it is not known."""
    argv = config.get("argv")
    return str(config.get("recipe") or (argv[0] if isinstance(argv, list) and argv else ""))
