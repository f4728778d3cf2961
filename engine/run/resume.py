"""What a run goes on from: a checkpoint of the learner, the journal of what followed it, the metrics before it.

Invariants
- The state is that after step `step`: its metrics are the last ones, its weights the next that are live; all that the
  journal does not know of later steps is done anew.
- A state is a checkpoint of the learner, what prompts were drawn before it, and the metrics up to it. When one of the
  three is damaged the state before it is used; when none is whole the run is not resumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from engine.run.checkpoints import CheckpointFolder, Unresumable, damage
from engine.run.journal import Journal
from engine.run.journal_files import floors, read_floor, segments
from engine.run.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """step: how many steps are trained and need not be trained again. rows: the metrics of steps 0 to `step`."""

    step: int
    rows: list[dict[str, float]]
    run: RunFolder
    journal: Journal
    checkpoints: CheckpointFolder
    resume_message: str  # for the user: what is resumed, and what was wrong; empty for a new run

    @classmethod
    def open(cls, run: RunFolder, groups_per_step: int) -> Self:
        """Raises Unresumable when no state is whole from which the journal leads to where the run was."""
        checkpoints = CheckpointFolder(run.path / "checkpoints")
        folder = run.path / "journal"
        step, faults = _newest(run, checkpoints, folder)
        journal = Journal(folder, groups_per_step, step)
        checkpoints.clear_after(step)
        lines = [f"{fault}; the state before it is used" for fault in faults]
        lines += map(str, journal.faults)
        if run.resumed:
            ended, begun = journal.held
            held = f"{ended} finished and {begun} unfinished trajectories in the journal"
            lines.append(f"resuming {run.path} at step {step}: {held}")
        return cls(
            step=step,
            rows=run.resume(step) if run.resumed else [],
            run=run,
            journal=journal,
            checkpoints=checkpoints,
            resume_message="\n".join(lines),
        )

    @property
    def checkpoint(self) -> str | None:
        """What `engine.learner.messages.Configure.resume` takes."""
        return str(self.checkpoints.of(self.step).resolve()) if self.step else None


def _newest(run: RunFolder, checkpoints: CheckpointFolder, folder: Path) -> tuple[int, list[str]]:
    """(step of the newest whole state, what is wrong with newer ones). folder: the journal's."""
    faults = list[str]()
    for step in reversed(checkpoints.steps()):
        if (fault := _fault(run, checkpoints, folder, step)) is None:
            return step, faults
        faults.append(fault)
    # The start is such a state as long as the journal reaches back to it. Else it would be a run from the start that
    # says it was resumed.
    if (faults or segments(folder) or floors(folder)) and 0 not in segments(folder):
        faults.append(f"{folder} does not go on from step 0")
        reasons = "".join(f"\n  {fault}" for fault in dict.fromkeys(faults))  # of two states it may be the same
        raise Unresumable(f"{run.path} cannot be resumed (fresh=true starts a new run):{reasons}")
    return 0, faults


def _fault(run: RunFolder, checkpoints: CheckpointFolder, folder: Path, step: int) -> str | None:
    """What is wrong with the state after a step."""
    if (fault := damage(checkpoints.of(step))) is not None:
        return f"checkpoint {checkpoints.of(step)} is damaged: {fault}"
    try:
        read_floor(folder, step)
        run.rows(step)
    except Unresumable as error:
        return str(error)
    return None
