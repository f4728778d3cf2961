"""Carries the exception that a forked process died of to its parent, which otherwise sees only that it is gone.

last_words = LastWords("vllm.v1.engine.core")
with last_words.kept():
    fork()  # the child logs the exception that it dies of
last_words.read()  # "RuntimeError: size mismatch for lm_head.weight"
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

LONGEST = 500  # characters of a message
_here = threading.local()  # last_words: those of the thread that forks, which its child inherits


class LastWords:
    """Keeps the exception that a process forked by one thread dies of. logger: the name of the logger that reports it.

    A child that is spawned or killed leaves none.
    """

    def __init__(self, logger: str) -> None:
        self._file: IO[bytes] | None = None
        self._logger = logging.getLogger(logger)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside this context, what this thread forks writes here. It can be entered once."""
        assert self._file is None
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (shared with the child, and gone with both)
        _here.last_words = self
        try:
            yield
        finally:
            _here.last_words = None

    def write(self, error: BaseException) -> None:
        cause = " ".join(str(error).split())
        line = f"{type(error).__name__}: {cause}"[:LONGEST] if cause else type(error).__name__
        assert self._file is not None
        data = line.encode(errors="replace")
        os.pwrite(self._file.fileno(), data, 0)
        os.ftruncate(self._file.fileno(), len(data))  # removes the end of a longer line before it

    def read(self) -> str:
        """Returns type and message of the exception, or "" if the child left none."""
        if self._file is None or self._file.closed:
            return ""
        return os.pread(self._file.fileno(), 4 * LONGEST, 0).decode(errors="replace")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def listen(self) -> None:
        """Listens in the child by a filter, since a library that configures logging anew removes handlers only."""
        self._logger.addFilter(self._keep_exception)

    def _keep_exception(self, record: logging.LogRecord) -> bool:
        if record.exc_info is not None and record.exc_info[1] is not None:
            self.write(record.exc_info[1])
        return True


def _begin_child() -> None:
    if (last_words := getattr(_here, "last_words", None)) is not None:
        last_words.listen()


os.register_at_fork(after_in_child=_begin_child)
