"""Writing files: whole or not at all, and a full disk is one clear error."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)


class CannotWrite(RuntimeError):
    """The run's folder cannot be written."""


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Turns a failed write below into CannotWrite with the path."""
    try:
        yield path
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise CannotWrite(
            f"cannot write {path}: {error.strerror}. Fix that and rerun the same command; the run resumes."
        ) from error


def append(file: int, data: bytes) -> None:
    """All of data at the end of the file that this descriptor is of, or nothing and an OSError."""
    if (written := os.write(file, data)) != len(data):
        os.ftruncate(file, os.fstat(file).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_whole(path: Path, data: Iterable[bytes]) -> None:
    """The file holds data, or what it held before, also when the machine loses power. Raises CannotWrite."""
    with writing(path):
        draft = path.with_suffix(".draft")
        try:
            write_synced(draft, data)
            draft.rename(path)
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(path.parent)


def write_synced(path: Path, data: Iterable[bytes]) -> None:
    """Writes a file; its content is on the disk when this returns."""
    with path.open("wb") as file:
        file.writelines(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Where to write a file or folder that appears at path when it is complete; nothing is left of one that failed.

    It replaces what is there. What a killed writer left is deleted by the next one. Unlike `write_whole` it does not
    wait for the disk.
    """
    folder = path.parent / f".{path.name}.unfinished"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder / "new"
        if path.is_dir():  # the one thing that a rename does not replace
            path.rename(folder / "old")
        (folder / "new").rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """What was created, renamed or deleted in a folder is on the disk when this returns."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
