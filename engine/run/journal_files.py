"""The files of a journal: their names, what is in one, and what is wrong with it.

    step-000012    a segment: the records of the groups of step 12 (from 0)
    drawn-000012   which prompts the steps before 12 drew
    other names    trajectories that are kept, those of an evaluation, say

Invariants
- A damaged byte in any of them is noticed: each record, and each file that is written whole, has a checksum.
- A segment is read up to its first record that is not whole. Nothing is changed by reading.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.atomic_files import write_whole
from engine.run.checkpoints import Unresumable
from engine.run.journal_records import frame, frames, is_cut_off


class Floor(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Which positions of the prompt stream the steps before `step` drew: all below `position` but the `undrawn`.

    position: at least as many as had been drawn. undrawn: those that later steps have, or nobody yet.

    >>> floor = Floor(step=2, position=6, undrawn=(4,))  # steps 0 and 1 drew 0, 1, 2, 3 and 5
    >>> floor.open(8)
    {4, 6, 7}
    """

    step: int
    position: int
    undrawn: tuple[int, ...]

    def open(self, position: int) -> set[int]:
        """The positions below that one which are not of the steps before."""
        return {*self.undrawn, *range(self.position, position)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What is wrong with a segment. Whatever of it is needed and lost is done again.

    at: the byte from which on nothing is whole; None: there is no such file. torn: it may have been cut off there when
    the run died; else it was damaged afterwards. needed: by the checkpoint that the run goes on from.
    """

    path: Path
    at: int | None = None
    lost_bytes: int = 0
    torn: bool = False
    needed: bool = True

    def __str__(self) -> str:
        if self.at is None:
            what, lost = f"{self.path} is missing", "what it held"
        else:
            how = "ends within a record" if self.torn else "is damaged"
            what, lost = f"{self.path} {how} at byte {self.at}", f"what its last {self.lost_bytes} bytes held"
        return f"{what}; {lost} is done again" if self.needed else f"{what}; nothing of it is needed"


def segment(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def segments(folder: Path) -> list[int]:
    """The steps that have one, ascending."""
    return _numbers(folder, "step-")


def floors(folder: Path) -> list[int]:
    """The steps for which it is written down what was drawn before them, ascending."""
    return _numbers(folder, "drawn-")


def floor_path(folder: Path, step: int) -> Path:
    return folder / f"drawn-{step:06d}"


def read_segments(folder: Path, first_step: int) -> Iterator[tuple[int, list[bytes], Fault | None]]:
    """(step, what its whole records are as bytes, what is wrong with it) from the oldest to the newest segment.

    first_step: what is of steps before it is not needed. Raises Unresumable for a segment that cannot be read.
    """
    found = segments(folder)
    # Only the tail of a segment that was written to since the last sync can have been torn.
    synced = max(floors(folder), default=0)
    for step in range(min([first_step, *found]), max(found, default=-1) + 1):
        path, needed = segment(folder, step), step >= first_step
        if step not in found:
            yield step, [], Fault(path=path, needed=needed)
            continue
        payloads, end, rest = _read_frames(path)
        fault = None
        if rest:
            torn = step >= synced and is_cut_off(rest)
            fault = Fault(path=path, at=end, lost_bytes=len(rest), torn=torn, needed=needed)
        yield step, payloads, fault


def read_floor(folder: Path, step: int) -> Floor:
    """Raises Unresumable, naming the file, when it is not there or not as it was written."""
    if step == 0:
        return Floor(step=0, position=0, undrawn=())
    payload = read_whole(path := floor_path(folder, step))
    if payload is None:
        raise Unresumable(f"{path}, which says what prompts were drawn before, is missing or damaged")
    floor = msgspec.msgpack.decode(payload, type=Floor)
    if floor.step != step:
        raise Unresumable(f"{path} is that of step {floor.step}")
    return floor


def write_floor(folder: Path, floor: Floor) -> None:
    write_whole(floor_path(folder, floor.step), [frame(msgspec.msgpack.encode(floor))])


def read_whole(path: Path) -> bytes | None:
    """The payload of a file that is one frame; None when it is not there or not whole."""
    if not path.exists():
        return None
    payloads, _, rest = _read_frames(path)
    return payloads[0] if len(payloads) == 1 and not rest else None


def delete(folder: Path, steps: Collection[int]) -> None:
    """Segments and floors of these steps, the oldest first."""
    for step in sorted(steps):
        segment(folder, step).unlink(missing_ok=True)
        floor_path(folder, step).unlink(missing_ok=True)


def _read_frames(path: Path) -> tuple[list[bytes], int, bytes]:
    """(payloads of the whole frames, where they end, what follows)."""
    try:
        data = path.read_bytes()
    except OSError as error:  # of a disk that fails, say
        raise Unresumable(f"{path} cannot be read: {error.strerror}") from error
    payloads, end = frames(data)
    return payloads, end, data[end:]


def _numbers(folder: Path, prefix: str) -> list[int]:
    """Those of files named so; not of a copy or a draft beside them."""
    names = (path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*"))
    return sorted(int(name) for name in names if name.isdecimal())
