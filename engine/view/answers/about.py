"""Answers the page "Run": the configuration and where it comes from, versions, checkpoints, what became of tokens."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from engine import metric_names as metric
from engine.run.checkpoints import CheckpointFolder
from engine.view.run_files import RunFiles

NOTES = 200  # newest lines of notes.log


def about(run: RunFiles) -> dict[str, Any]:
    """Describes a run as a whole. given: the options that the command line set."""
    config = {name: value for name, value in run.config.items() if name not in ("argv", "versions")}
    argv = [str(part) for part in run.config.get("argv", [])]
    summary = run.summary
    return {
        "path": str(run.path),
        "state": run.state,
        "config": config,
        "given": _given(config, argv),
        "argv": argv,
        "versions": run.config.get("versions") or (summary or {}).get("versions", {}),
        "summary": summary,
        "summary_fault": run.summary_fault,
        "checkpoints": _checkpoints(run.path),
        "journal_steps": _journal_steps(run.path),
        "recording": _recording(run),
        "waste": _waste(run.rows),
        "notes": _tail(run.path / "notes.log"),
        "learner_log": _tail(run.path / "learner.log"),
        "problems": run.problems,
    }


def _given(config: dict[str, Any], argv: list[str]) -> list[str]:
    """Returns the options that a command line sets; it may name one by its last part.

    >>> _given({"steps": 3, "learner.lr": 0.1, "seed": 0}, ["recipes/quickstart.py", "lr=0.1", "seed=0"])
    ['learner.lr', 'seed']
    """
    named = {part.partition("=")[0] for part in argv}
    return [name for name in config if name in named or name.rpartition(".")[2] in named]


def _checkpoints(run: Path) -> list[dict[str, Any]]:
    folder = CheckpointFolder(run / "checkpoints")
    checkpoints = []
    for step in folder.steps():
        with suppress(OSError):  # the run may delete an old one meanwhile
            files = [path.stat() for path in folder.of(step).iterdir()]
            checkpoints.append(
                {
                    "step": step,
                    "bytes": sum(file.st_size for file in files),
                    "written_at": max((file.st_mtime for file in files), default=0.0),
                }
            )
    return checkpoints


def _journal_steps(run: Path) -> list[int]:
    """Returns the steps, from 1, whose rollouts the journal holds, so that resuming does not repeat them."""
    return sorted(int(path.name[5:]) + 1 for path in (run / "journal").glob("step-*") if path.name[5:].isdecimal())


def _recording(run: RunFiles) -> dict[str, Any] | None:
    index = run.recorded.index
    return msgspec.to_builtins(index) if index is not None else None


def _waste(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Counts the tokens of the whole run by what became of them."""
    counts: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            fate = "trained" if name == metric.TOKENS_TRAINED else metric.part_of(metric.WASTE, name)
            if fate is not None:
                counts[fate] = counts.get(fate, 0) + int(value)
    return counts


def _tail(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-NOTES:]
    return []
