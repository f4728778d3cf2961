"""Answers why a run got slower, and how its pace compares with that of another run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from engine.diagnosis.changes import changes
from engine.diagnosis.comparison import compare
from engine.view.answers.trajectories import NotThere
from engine.view.run_files import RunFiles


def changes_of(run: RunFiles) -> list[dict[str, Any]]:
    """Returns the changes of the run's pace in order (`engine.diagnosis.changes.Change`)."""
    return [asdict(change) for change in changes(run.rows)]


def comparison_of(run: RunFiles, other: RunFiles) -> dict[str, Any]:
    """Returns the pace of `run` beside that of `other` (`engine.diagnosis.comparison.Comparison`). Raises NotThere if
    they have no step in common.
    """
    try:
        compared = compare(other.rows, run.rows, other.config, run.config, names=(other.name, run.name))
    except ValueError as error:
        raise NotThere(str(error)) from error
    return asdict(compared)
