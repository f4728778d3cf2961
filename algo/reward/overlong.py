"""What a response loses for being long, before it is cut off.

Source: DAPO (arXiv 2503.14476, section 3.4, eq. 13). Its other rule, no loss for a response that was cut off, is
`algo.group.selection.KeepFinished`.
"""

from __future__ import annotations


def overlong_penalty(length: int, *, longest: int, buffer: int, factor: float = 1.0) -> float:
    """To be added to a reward: 0 up to longest - buffer tokens, from there linearly down to -factor at `longest`.

    Beyond `longest` it stays -factor. Which tokens count as the response's length is the caller's choice.
    Raises ValueError unless 0 < buffer <= longest.

    >>> overlong_penalty(14, longest=16, buffer=8)
    -0.75
    """
    if not 0 < buffer <= longest:
        raise ValueError(f"buffer must be in (0, {longest}], got {buffer}")
    return -factor * min(1.0, max(0.0, (length - (longest - buffer)) / buffer))
