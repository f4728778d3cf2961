"""Writing files: whole or not at all, and a full disk is one clear error."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)


class DiskFull(RuntimeError):
    """The run's folder cannot be written."""


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Turns a failed write below into DiskFull with the path."""
    try:
        yield path
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskFull(f"cannot write {path}: {error.strerror}; start again when that is mended") from error


def append(file: int, data: bytes) -> None:
    """All of data at the end of the file that this descriptor is of, or nothing and an OSError."""
    if (written := os.write(file, data)) != len(data):
        os.ftruncate(file, os.fstat(file).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_whole(path: Path, data: Iterable[bytes]) -> None:
    """The file holds data, or what it held before, also when the machine loses power. Raises DiskFull."""
    with writing(path):
        draft = path.with_suffix(".draft")
        try:
            with draft.open("wb") as file:
                file.writelines(data)
                file.flush()
                os.fsync(file.fileno())
            draft.rename(path)
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """What was created, renamed or deleted in a folder is on the disk when this returns."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
