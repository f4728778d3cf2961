"""What a run was and left, for the page "Run": configuration with its origin, versions, resume points, waste."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from engine.run.checkpoints import CheckpointFolder
from engine.view.run_files import RunFiles

NOTES = 200  # lines of notes.log, the newest


def about(run: RunFiles) -> dict[str, Any]:
    """given: names of the options that the command line set."""
    config = {name: value for name, value in run.config.items() if name not in ("argv", "versions")}
    argv = [str(word) for word in run.config.get("argv", [])]
    summary = run.summary
    return {
        "path": str(run.path),
        "state": run.state,
        "config": config,
        "given": _given(config, argv),
        "argv": argv,
        "versions": run.config.get("versions") or (summary or {}).get("versions", {}),
        "summary": summary,
        "checkpoints": _checkpoints(run.path),
        "journal_steps": _journal_steps(run.path),
        "recording": _recording(run),
        "waste": _waste(run.rows),
        "notes": _tail(run.path / "notes.log"),
        "learner_log": _tail(run.path / "learner.log"),
        "problems": run.problems,
    }


def _given(config: dict[str, Any], argv: list[str]) -> list[str]:
    """An option may be given by the last of its names.

    >>> _given({"steps": 3, "learner.lr": 0.1, "seed": 0}, ["recipes/quickstart.py", "lr=0.1", "--seed", "0"])
    ['learner.lr', 'seed']
    """
    words = {word.lstrip("-").partition("=")[0] for word in argv}
    return [name for name in config if name in words or name.rpartition(".")[2] in words]


def _checkpoints(run: Path) -> list[dict[str, Any]]:
    folder = CheckpointFolder(run / "checkpoints")
    found = []
    for step in folder.steps():
        with suppress(OSError):  # the run deletes old ones while we look
            files = [path.stat() for path in folder.of(step).iterdir()]
            found.append(
                {
                    "step": step,
                    "bytes": sum(file.st_size for file in files),
                    "written_at": max((file.st_mtime for file in files), default=0.0),
                }
            )
    return found


def _journal_steps(run: Path) -> list[int]:
    """The steps, from 1, whose rollouts the journal holds, so that they need not be made again."""
    return sorted(int(path.name[5:]) + 1 for path in (run / "journal").glob("step-*") if path.name[5:].isdecimal())


def _recording(run: RunFiles) -> dict[str, Any] | None:
    index = run.recorded.index
    return msgspec.to_builtins(index) if index is not None else None


def _waste(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Tokens of the whole run by what became of them."""
    found: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            if name == "tokens/trained":
                found["trained"] = found.get("trained", 0) + int(value)
            elif name.startswith("waste/"):
                reason = name.removeprefix("waste/").removesuffix("_tokens")
                found[reason] = found.get(reason, 0) + int(value)
    return found


def _tail(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-NOTES:]
    return []
