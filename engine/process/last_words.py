"""Why a forked process died, in its own words: its parent sees that it is gone, and no more.

words = LastWords("vllm.v1.engine.core")
with words.kept():
    fork()  # whose child logs the exception that it dies of
words.read()  # "RuntimeError: size mismatch for lm_head.weight"
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
_here = threading.local()  # words: of the thread that forks, and so of its child


class LastWords:
    """Keeps the last words of what one thread forks. logger: the name of the logger with which the child logs its end.

    A child that is spawned or that is killed leaves none.
    """

    def __init__(self, logger: str) -> None:
        self._file: IO[bytes] | None = None
        self._logger = logging.getLogger(logger)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What this thread forks meanwhile writes here. Once."""
        assert self._file is None
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (shared with the child, and gone with both)
        _here.words = self
        try:
            yield
        finally:
            _here.words = None

    def write(self, error: BaseException) -> None:
        cause = " ".join(str(error).split())
        line = f"{type(error).__name__}: {cause}"[:LONGEST] if cause else type(error).__name__
        assert self._file is not None
        os.pwrite(self._file.fileno(), line.encode(errors="replace"), 0)

    def read(self) -> str:
        """Empty where nothing was said."""
        if self._file is None or self._file.closed:
            return ""
        return os.pread(self._file.fileno(), 4 * LONGEST, 0).decode(errors="replace")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def listen(self) -> None:
        """Listens in the child, by a filter: a library that configures logging anew takes away handlers, no filters."""
        self._logger.addFilter(self._hear)

    def _hear(self, record: logging.LogRecord) -> bool:
        if record.exc_info is not None and record.exc_info[1] is not None:
            self.write(record.exc_info[1])
        return True


def _begin_child() -> None:
    if (words := getattr(_here, "words", None)) is not None:
        words.listen()


os.register_at_fork(after_in_child=_begin_child)
