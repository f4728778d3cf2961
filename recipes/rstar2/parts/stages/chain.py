"""Finds out what a stage goes on from, in the folders of its chain: runs/NAME/stage-1, stage-2 and so on.

Invariant: results are never mixed. A folder that holds a run of other values is refused, and a stage begins only with
one that has ended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.errors import BadInput
from engine.run.checkpoints import CheckpointFolder
from engine.run.identity import Identity, describe
from engine.run.run_folder import RunFolder


def folder_of(chain: Path, number: int) -> Path:
    return chain / f"stage-{number}"


def has_ended(path: Path, steps: int = 0) -> bool:
    """Returns whether the run there has ended with so many steps or more. Raises BadInput for damaged options."""
    made = _options(path)
    return (path / "summary.json").exists() and made is not None and made["steps"] >= steps


def weights_before(chain: Path, number: int) -> Path | None:
    """Returns the weights that a stage goes on from, or None without a stage before it.

    Raises BadInput where the stage before has not ended.
    """
    before = folder_of(chain, number - 1)
    if number == 1 or not before.exists():
        return None
    if not has_ended(before):
        raise BadInput(
            f"{before} has not ended. Fix: run stage={number - 1} first, or give another name= and model= to begin with"
        )
    return before / "checkpoint"


def optimizer_before(chain: Path, number: int) -> Path | None:
    """Returns the learner's state at the end of the stage before, if it was kept."""
    states = CheckpointFolder(folder_of(chain, number - 1) / "checkpoints")
    return states.of(states.steps()[-1]) if states.steps() else None


def check_same(path: Path, identity: Identity) -> None:
    """Raises BadInput where the folder holds a run of other values."""
    made = _options(path)
    if made is not None and (differences := identity.differences(made)):
        raise BadInput(f"{path} holds a run that differs in {describe(differences)}. Fix: give another name=")


def open_stage(path: Path, identity: Identity, steps: int) -> RunFolder:
    """Opens the folder of a stage, to begin it or to go on.

    Raises BadInput where another process writes there, and what `RunFolder.open` raises.
    """
    folder = RunFolder.open(path.parent, path.name, identity, steps=steps)
    if folder.path != path:
        with folder:  # leaving it deletes this folder, which was made just now
            raise BadInput(f"{path} is written by another process. Fix: wait for it, or give another name=")
    return folder


def _options(path: Path) -> dict[str, Any] | None:
    """Returns what the run's config.json says, or None without one. Raises BadInput where it is damaged."""
    try:
        return msgspec.json.decode((path / "config.json").read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise BadInput(f"{path / 'config.json'} is damaged: {error}. Fix: give another name=") from error
