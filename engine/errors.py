"""One clear error instead of a tree."""

from __future__ import annotations


def first_error(failures: BaseExceptionGroup) -> BaseException:
    """The first leaf of an exception group that is not a cancellation, else the first leaf."""
    leaves = list(_leaves(failures))
    return next((leaf for leaf in leaves if isinstance(leaf, Exception)), leaves[0])


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
