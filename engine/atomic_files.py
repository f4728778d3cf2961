"""Writes files whole or not at all, and reports a full disk as one clear error."""

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
    """Raises CannotWrite, which names the path, if a write within it fails by the disk or by permissions."""
    try:
        yield path
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise CannotWrite(
            f"cannot write {path}: {error.strerror}. Fix that and rerun the same command; the run resumes."
        ) from error


def append(file: int, data: bytes) -> None:
    """Appends all of data to the file of this descriptor, or appends nothing and raises OSError."""
    if (written := os.write(file, data)) != len(data):
        os.ftruncate(file, os.fstat(file).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_whole(path: Path, data: Iterable[bytes]) -> None:
    """Replaces a file's content; after a crash or a loss of power it is the old or the new one. Raises CannotWrite."""
    with writing(path):
        draft = path.with_name(f".{path.name}.draft")
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
    """Yields where to write a file or folder, which replaces what is at `path` if the block ends without an error.

    Nothing is left of a failed write, and the next writer deletes what a killed one left. Unlike `write_whole` it does
    not wait for the disk.
    """
    folder = path.parent / f".{path.name}.unfinished"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder / "new"
        if path.is_dir():  # a rename replaces a file, but no folder
            path.rename(folder / "old")
        (folder / "new").rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Waits until what was created, renamed or deleted in a folder is on the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
