"""The learner's checkpoints as the node sees them: which there are, which one to go on from.

Invariants
- Only a checkpoint whose every file has the size and the checksum of its manifest is used.
"""

from __future__ import annotations

import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec


class Unresumable(ValueError):
    """A run that did not end cannot go on: no state of it is whole. The message says what is wrong with each."""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """`checkpoints/step-000012` holds the learner's state after step 12 (`algo.learner.state.checkpoint` writes it)."""

    path: Path

    def of(self, step: int) -> Path:
        return self.path / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Those that are complete, ascending."""
        return sorted(int(path.name[5:]) for path in self.path.glob("step-*") if path.name[5:].isdecimal())

    def clear_after(self, step: int) -> None:
        """Deletes what a learner that was killed had begun, and the checkpoints after this one, which the run that
        goes on from it will write again: one of the two might be taken for the other's.
        """
        for path in [*self.path.glob(".step-*"), *(self.of(later) for later in self.steps() if later > step)]:
            shutil.rmtree(path, ignore_errors=True)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None when each file is as its manifest says."""
    try:
        manifest = msgspec.json.decode((path / "manifest.json").read_bytes(), type=dict[str, tuple[int, int]])
        for name, (size, checksum) in manifest.items():
            found, length = 0, 0
            with (path / name).open("rb") as file:
                while piece := file.read(1 << 24):
                    found, length = zlib.crc32(piece, found), length + len(piece)
            if (length, found) != (size, checksum):
                return f"{name} has {length} bytes with checksum {found:08x}, not {size} with {checksum:08x}"
    except (OSError, ValueError) as error:
        return str(error)
    return None
