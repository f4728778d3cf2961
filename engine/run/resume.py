"""The state from which a run resumes: a learner's checkpoint, the metrics up to it, and the journal of what followed.

Invariants
- The state is the one after step `step`. Its metrics are the last ones, and its weights go live next. Work on later
  steps that the journal does not hold is repeated.
- A state consists of a learner's checkpoint, the floor of the prompts drawn before it, and the metrics up to it. If one
  of the three is damaged, the state before it is used; if no state is whole, the run is not resumed.
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
    """Where a run begins. step: the number of steps that are trained. rows: the metrics of steps 0 to `step`."""

    step: int
    rows: list[dict[str, float]]
    run: RunFolder
    journal: Journal
    checkpoints: CheckpointFolder
    resume_message: str  # tells the user what is resumed and what was damaged; empty for a new run

    @classmethod
    def open(cls, run: RunFolder, groups_per_step: int) -> Self:
        """Finds the newest whole state of a run. Raises Unresumable if there is none that the journal continues."""
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
        """The checkpoint as `engine.learner.messages.Configure.resume` takes it; None for the start of a run."""
        return str(self.checkpoints.of(self.step).resolve()) if self.step else None


def _newest(run: RunFolder, checkpoints: CheckpointFolder, folder: Path) -> tuple[int, list[str]]:
    """Returns the step of the newest whole state, and the faults of newer ones. folder: the journal's."""
    faults = list[str]()
    for step in reversed(checkpoints.steps()):
        if (fault := _fault(run, checkpoints, folder, step)) is None:
            return step, faults
        faults.append(fault)
    # Step 0 is a whole state as long as the journal reaches back to it. Otherwise the run would start over and claim
    # that it was resumed.
    if (faults or segments(folder) or floors(folder)) and 0 not in segments(folder):
        faults.append(f"{folder} does not reach back to step 0")
        reasons = "".join(f"\n  {fault}" for fault in dict.fromkeys(faults))  # two states may share a fault
        raise Unresumable(f"{run.path} cannot be resumed (fresh=true starts a new run):{reasons}")
    return 0, faults


def _fault(run: RunFolder, checkpoints: CheckpointFolder, folder: Path, step: int) -> str | None:
    """Returns what is wrong with the state after a step, None if it is whole."""
    if (fault := damage(checkpoints.of(step))) is not None:
        return f"checkpoint {checkpoints.of(step)} is damaged: {fault}"
    try:
        read_floor(folder, step)
        run.rows(step)
    except Unresumable as error:
        return str(error)
    return None
