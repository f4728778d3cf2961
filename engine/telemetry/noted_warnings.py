"""Copies the warnings that the rewards of `algo` log into the notes of the run, where a user looks for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_NOTES = 100


class _Notes(logging.Handler):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note
        self._left = MOST_NOTES

    def emit(self, record: logging.LogRecord) -> None:
        if self._left:
            self._left -= 1
            self._note(" ".join(record.getMessage().split()))


@contextmanager
def noted_warnings(note: Callable[[str], None], logger: str = "algo") -> Iterator[None]:
    """Inside, the first MOST_NOTES warnings of a logger, and of the loggers below it, are noted."""
    handler = _Notes(note)
    logging.getLogger(logger).addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger(logger).removeHandler(handler)
