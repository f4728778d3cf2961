"""The files of a record: compressed frames with a checksum, and files that appear whole.

Invariants
- A step's file is there whole or not at all, also when a process is killed. The timeline of a step and the rows grow by
  whole frames; a frame that a killed writer left unfinished is cut off before the next one, and readers stop before it.
- Reading does not raise for files that are damaged, missing or just deleted: it returns what is there.

A frame is that of `engine.encoding`: length, CRC-32, payload; the payload is compressed.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from engine.atomic_files import append
from engine.encoding import HEADER, encode, frame, frames
from engine.errors import BadInput
from engine.numbered_files import numbered
from engine.recording.records import Record, StepRow, decode
from engine.recording.soundness import is_sound

STEP, TIMELINE = "step-{:06d}.rec", "step-{:06d}.seg"
RECORD_BYTES = 1 << 28  # bound of one record: what would unpack to more was not written by a run
LEVEL = 1  # zlib's level: others are a few per cent smaller and several times as slow


def folder_of(run: Path) -> Path:
    return run / "record"


def check_files(run: Path) -> None:
    """Raises BadInput if this is no folder of a run, or if a pipe or a device stands in the place of a file.

    A reader would wait for such a file, or read without end. No run writes one, but the folder may come from somebody
    else.
    """
    record = folder_of(run)
    if not record.is_dir() and not (run / "config.json").is_file():
        raise BadInput(f"{run} is no folder of a run. Fix: name one, such as runs/quickstart")
    for folder in (run, record, record / "steps", record / "timeline"):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.exists() and not path.is_file() and not path.is_dir():
                raise BadInput(f"{path} is no file that can be read to its end. Fix: delete it")


def step_path(folder: Path, step: int) -> Path:
    return folder / "steps" / STEP.format(step)


def timeline_path(folder: Path, step: int) -> Path:
    return folder / "timeline" / TIMELINE.format(step)


def rows_path(folder: Path) -> Path:
    return folder / "rows.log"


def index_path(folder: Path) -> Path:
    return folder / "index.json"


def tokenizer_path(folder: Path) -> Path:
    return folder / "tokenizer.json"


def steps_in(folder: Path) -> dict[int, int]:
    """Returns {step: bytes} for the steps that are kept whole, ascending."""
    return _sizes(folder / "steps", STEP)


def timeline_in(folder: Path) -> dict[int, int]:
    """Returns {step: bytes} for the steps whose timeline is there, ascending."""
    return _sizes(folder / "timeline", TIMELINE)


def _sizes(folder: Path, pattern: str) -> dict[int, int]:
    sizes = {}
    for step, path in numbered(folder, pattern).items():
        with suppress(OSError):  # the run deletes while others read
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                sizes[step] = status.st_size
    return sizes


def number_of(path: Path) -> int:
    """Returns the number of the file on its file system; 0 if there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def packed(record: Record) -> bytes:
    return frame(zlib.compress(encode(record), LEVEL))


def unpacked(payload: bytes, most: int = RECORD_BYTES) -> Record | None:
    """Returns the record; None for one of another version, of more than `most` bytes, or that no run has written."""
    if (data := inflated(payload, most)) is None:
        return None
    try:
        record = decode(data)
    except (ValueError, TypeError, RecursionError):  # msgspec lets through what is not its own
        return None
    return record if is_sound(record) else None


def inflated(payload: bytes, most: int = RECORD_BYTES) -> bytes | None:
    """Returns the encoded record; None for a damaged one, or one of more than `most` bytes."""
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(payload, most)
        return data if unpacking.eof else None
    except zlib.error:
        return None


def write(path: Path, parts: Iterable[bytes]) -> int:
    """Writes a file that appears with all its parts; returns its bytes. Does not wait for the disk. Raises OSError."""
    draft = path.with_suffix(".draft")
    try:
        with draft.open("wb") as file:
            file.writelines(parts)
            size = file.tell()
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    return size


def append_to(path: Path, record: Record) -> int:
    """Appends a record, whole or not at all; returns its bytes. Raises OSError."""
    data = packed(record)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        append(file, data)
    finally:
        os.close(file)
    return len(data)


def cut_torn(path: Path) -> None:
    """Cuts off whatever follows the whole frames of a file. Raises OSError."""
    if path.exists():
        _, end = frames(path.read_bytes())
        os.truncate(path, end)


def read_frames(path: Path, first: int, count: int) -> list[Record]:
    """Returns some records of a file by their numbers, up to the first that is damaged; only these are decompressed."""
    records: list[Record] = []
    for payload in _payloads(path, first, count):
        if (record := unpacked(payload)) is None:
            break
        records.append(record)
    return records


def read_data(path: Path, first: int, count: int) -> Iterator[bytes]:
    """Yields what `read_frames` decodes."""
    for payload in _payloads(path, first, count):
        if (data := inflated(payload)) is None:
            return
        yield data


def groups_in(path: Path, step: int) -> int:
    """Returns how many groups the file of a step begins with; 0 if it is not of this step."""
    rows = read_frames(path, 0, 1)
    if not rows or not isinstance(rows[0], StepRow) or rows[0].step != step:  # the file may have been renamed
        return 0
    return len(rows[0].groups)


def _payloads(path: Path, first: int, count: int) -> Iterator[bytes]:
    with suppress(OSError), path.open("rb") as file:
        for number in range(first + count):
            header = file.read(HEADER.size)
            if len(header) < HEADER.size:
                return
            length, _ = HEADER.unpack(header)
            if number < first:
                file.seek(length, os.SEEK_CUR)
                continue
            payloads, _ = frames(header + file.read(length))
            if not payloads:
                return
            yield payloads[0]


def read_after(path: Path, offset: int) -> tuple[list[Record], int]:
    """Returns the records of a growing file after an offset, and where its whole frames end now."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            payloads, end = frames(file.read())
    except OSError:
        return [], offset
    return [record for payload in payloads if (record := unpacked(payload)) is not None], offset + end
