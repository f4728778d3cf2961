"""What a run goes on from: a checkpoint of the learner, the journal of what followed it, the metrics before it.

Invariants
- The state is that after step `step`: its metrics are the last ones, its weights the next that are live; all that the
  journal does not know of later steps is done anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from engine.checkpoints import CheckpointFolder, Unresumable
from engine.journal import Journal
from engine.record import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """step: how many steps are trained and need not be trained again. rows: the metrics of steps 0 to `step`."""

    step: int
    rows: list[dict[str, float]]
    run: RunFolder
    journal: Journal
    checkpoints: CheckpointFolder
    story: str  # for the user: what is resumed, and what was wrong; empty for a new run

    @classmethod
    def open(cls, run: RunFolder, groups_per_step: int) -> Self:
        """Raises Unresumable when neither a whole checkpoint nor the journal leads to where the run was."""
        checkpoints = CheckpointFolder(run.path / "checkpoints")
        step, faults = checkpoints.newest()
        journal = Journal(run.path / "journal", groups_per_step)
        if step < (journal.first_step or 0) or (step and not journal.position):  # else all is drawn again
            faults.append(f"{journal.folder} does not go on from step {step}, the newest that is whole")
            reasons = "".join(f"\n  {fault}" for fault in faults)
            raise Unresumable(f"{run.path} cannot be resumed (fresh=true starts a new run):{reasons}")
        checkpoints.clear_drafts()
        ended, begun = journal.held(step)
        story = [f"{fault}; the one before it is used" for fault in faults]
        if journal.torn_bytes:
            story.append(f"the journal's last {journal.torn_bytes} bytes were not whole")
        if run.resumed:
            held = f"{ended} finished and {begun} unfinished trajectories in the journal"
            story.append(f"resuming {run.path} at step {step}: {held}")
        return cls(
            step=step,
            rows=run.resume(step) if run.resumed else [],
            run=run,
            journal=journal,
            checkpoints=checkpoints,
            story="\n".join(story),
        )

    @property
    def checkpoint(self) -> str | None:
        """What `engine.link.Configure.resume` takes."""
        return str(self.checkpoints.of(self.step).resolve()) if self.step else None
