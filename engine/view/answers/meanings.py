"""Answers what the metrics of a run mean."""

from __future__ import annotations

from engine.telemetry.meanings import meaning_of
from engine.view.run_files import RunFiles


def meanings_of(run: RunFiles) -> dict[str, str | None]:
    """Returns the unit and meaning of each metric that the run has measured, None for the recipe's own metrics."""
    names = sorted({name for row in run.rows for name in row} - {"step"})
    meanings = {name: meaning_of(name) for name in names}
    return {name: None if meaning is None else meaning.text for name, meaning in meanings.items()}
