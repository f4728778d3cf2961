"""A run's private folder in shared memory, for published weights, local sockets and this process's temporary files.

Invariant: the folder is gone when the node has ended. The next node removes the folder of a killed one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "rocstar-"


@contextmanager
def workspace(parent: Path | None = None) -> Iterator[Path]:
    """Makes a new 0700 folder in parent, by default in /dev/shm, or in the temporary folder if there is none."""
    if parent is None:
        parent = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    _sweep(parent)
    path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
    before, tempfile.tempdir = tempfile.tempdir, str(path)  # vLLM leaves sockets and files in the temporary folder
    try:
        with _held(path):
            yield path
    finally:
        tempfile.tempdir = before
        shutil.rmtree(path, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Removes the folders of nodes that have died."""
    for path in parent.glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with suppress(OSError), _held(path):
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Locks a folder. Raises OSError if a node holds it: one in another container shows its lock, not its process."""
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(folder)
