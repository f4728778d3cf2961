"""The learner's checkpoints as the node sees them: which exist, and which one a run resumes from.

Invariant: a checkpoint is used only if every file has the size and the checksum that its manifest gives.
"""

from __future__ import annotations

import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec


class Unresumable(ValueError):
    """An unfinished run cannot be resumed, because none of its states is whole. The message names the fault of each."""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder of checkpoints: `step-000012` holds the learner's state after step 12.

    `algo.learner.state.checkpoint` writes it.
    """

    path: Path

    def of(self, step: int) -> Path:
        return self.path / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, ascending."""
        return sorted(int(path.name[5:]) for path in self.path.glob("step-*") if path.name[5:].isdecimal())

    def clear_after(self, step: int) -> None:
        """Deletes half-written checkpoints of a killed learner, and all checkpoints after this step.

        The resumed run writes the later ones again; an old one could be taken for its own.
        """
        for path in [*self.path.glob(".step-*"), *(self.of(later) for later in self.steps() if later > step)]:
            shutil.rmtree(path, ignore_errors=True)


def damage(path: Path) -> str | None:
    """Returns what is wrong with a checkpoint, or None if each file matches its manifest."""
    try:
        manifest = msgspec.json.decode((path / "manifest.json").read_bytes(), type=dict[str, tuple[int, int]])
        for name, (size, checksum) in manifest.items():
            actual, length = 0, 0
            with (path / name).open("rb") as file:
                while piece := file.read(1 << 24):
                    actual, length = zlib.crc32(piece, actual), length + len(piece)
            if (length, actual) != (size, checksum):
                return f"{name} has {length} bytes with checksum {actual:08x}, not {size} with {checksum:08x}"
    except (OSError, ValueError) as error:
        return str(error)
    return None
