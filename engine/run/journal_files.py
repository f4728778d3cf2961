"""The files of a journal: their names, their contents, and their damage.

    step-000012    a segment: the records of the groups of step 12 (from 0)
    drawn-000012   the positions of the prompt stream that the steps before 12 drew
    other names    trajectories that are kept, such as those of an evaluation

Invariants
- A damaged byte in any of them is noticed: each record, and each file that is written as a whole, has a checksum.
- A segment is read up to its first damaged record. Reading changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.atomic_files import write_whole
from engine.encoding import frame, frames
from engine.run.checkpoints import Unresumable
from engine.run.journal_records import is_cut_off


class Floor(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The positions of the prompt stream that the steps before `step` drew: all below `position` except `undrawn`.

    position: no position from here on had been drawn. undrawn: positions that later steps drew, or nobody yet.

    >>> floor = Floor(step=2, position=6, undrawn=(4,))  # steps 0 and 1 drew 0, 1, 2, 3 and 5
    >>> floor.open(8)
    {4, 6, 7}
    """

    step: int
    position: int
    undrawn: tuple[int, ...]

    def open(self, position: int) -> set[int]:
        """Returns the positions below `position` that the steps before did not draw."""
        return {*self.undrawn, *range(self.position, position)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """The damage of a segment. Lost work that is needed is repeated.

    at: the byte where the damage begins; None if the file is missing. torn: whether the file may have been cut off
    there when the run died; otherwise it was damaged later. needed: whether the run needs this segment to resume from
    its checkpoint.
    """

    path: Path
    at: int | None = None
    lost_bytes: int = 0
    torn: bool = False
    needed: bool = True

    def __str__(self) -> str:
        if self.at is None:
            what, lost = f"{self.path} is missing", "the work that it held"
        else:
            how = "ends within a record" if self.torn else "is damaged"
            what, lost = f"{self.path} {how} at byte {self.at}", f"the work in its last {self.lost_bytes} bytes"
        return f"{what}; {lost} is done again" if self.needed else f"{what}; the run does not need it"


def segment(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def segments(folder: Path) -> list[int]:
    """Returns the steps that have a segment, ascending."""
    return _numbers(folder, "step-")


def floors(folder: Path) -> list[int]:
    """Returns the steps that have a floor, ascending."""
    return _numbers(folder, "drawn-")


def floor_path(folder: Path, step: int) -> Path:
    return folder / f"drawn-{step:06d}"


def read_segments(folder: Path, first_step: int) -> Iterator[tuple[int, list[bytes], Fault | None]]:
    """Yields (step, payloads of its whole records, its damage) from the oldest segment to the newest.

    first_step: segments of earlier steps are not needed. Raises Unresumable for a segment that cannot be read.
    """
    steps = segments(folder)
    # Only a segment that was written to since the last sync can have a torn tail.
    synced = max(floors(folder), default=0)
    for step in range(min([first_step, *steps]), max(steps, default=-1) + 1):
        path, needed = segment(folder, step), step >= first_step
        if step not in steps:
            yield step, [], Fault(path=path, needed=needed)
            continue
        payloads, end, rest = _read_frames(path)
        fault = None
        if rest:
            torn = step >= synced and is_cut_off(rest)
            fault = Fault(path=path, at=end, lost_bytes=len(rest), torn=torn, needed=needed)
        yield step, payloads, fault


def read_floor(folder: Path, step: int) -> Floor:
    """Reads the floor of a step. Raises Unresumable naming the file if it is missing or damaged."""
    if step == 0:
        return Floor(step=0, position=0, undrawn=())
    payload = read_whole(path := floor_path(folder, step))
    if payload is None:
        raise Unresumable(f"{path}, which lists the prompts that were drawn before, is missing or damaged")
    floor = msgspec.msgpack.decode(payload, type=Floor)
    if floor.step != step:
        raise Unresumable(f"{path} is the one of step {floor.step}")
    return floor


def write_floor(folder: Path, floor: Floor) -> None:
    """Writes the floor of its step, complete or not at all."""
    write_whole(floor_path(folder, floor.step), [frame(msgspec.msgpack.encode(floor))])


def read_whole(path: Path) -> bytes | None:
    """Returns the payload of a file that is one frame; None if it is missing or damaged."""
    if not path.exists():
        return None
    payloads, _, rest = _read_frames(path)
    return payloads[0] if len(payloads) == 1 and not rest else None


def delete(folder: Path, steps: Collection[int]) -> None:
    """Deletes the segments and floors of these steps, the oldest first."""
    for step in sorted(steps):
        segment(folder, step).unlink(missing_ok=True)
        floor_path(folder, step).unlink(missing_ok=True)


def _read_frames(path: Path) -> tuple[list[bytes], int, bytes]:
    """Returns (payloads of the whole frames, where they end, the bytes that follow)."""
    try:
        data = path.read_bytes()
    except OSError as error:  # such as a disk that fails
        raise Unresumable(f"{path} cannot be read: {error.strerror}") from error
    payloads, end = frames(data)
    return payloads, end, data[end:]


def _numbers(folder: Path, prefix: str) -> list[int]:
    """Returns the numbers in the names of such files, ascending; a copy or a draft beside them has none."""
    names = (path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*"))
    return sorted(int(name) for name in names if name.isdecimal())
