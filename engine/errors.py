"""Reports one clear error in place of an exception group, or of a cancellation that nobody asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class BadInput(ValueError):
    """What the user gave cannot be used, such as a row of a data file. The message is one line with the fix."""


def first_error(failures: BaseExceptionGroup) -> BaseException:
    """Returns the first leaf of an exception group that is not a cancellation, else the first leaf."""
    leaves = list(_leaves(failures))
    return next((leaf for leaf in leaves if isinstance(leaf, Exception)), leaves[0])


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an error; in a group, to the error that `first_error` returns."""
    (first_error(error) if isinstance(error, BaseExceptionGroup) else error).add_note(note)


@contextmanager
def no_foreign_cancel(what: str) -> Iterator[None]:
    """Turns a CancelledError that leaked from something shared (a look-up that several calls await, say) into a
    RuntimeError that names `what`; otherwise this task would end silently.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise RuntimeError(f"{what}: something that it awaits was cancelled, and it was not") from error


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
