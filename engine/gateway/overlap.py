"""Where a text that is still growing may hold the beginning of a mark."""

from __future__ import annotations


def overlap(text: str, mark: str) -> int:
    """Returns how many characters at the end of a text may be the beginning of a mark.

    >>> overlap("I am </th", "</think>"), overlap("I am", "</think>")
    (4, 0)
    """
    most = min(len(text), len(mark) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(mark[:size])), 0)
