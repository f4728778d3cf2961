"""Sums up which trajectories failed, by no fault of the model's: their number and the first error, by cause."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.types import Trajectory
from sandbox.printable import printable

SHOWN_CHARS = 200  # the most that is shown of a message
CAUSES = 4  # of a boundary that are told apart
_VARIES = re.compile(r"0x[0-9a-f]+|[0-9]+")  # in messages of one cause


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The trajectories that failed at one boundary by one cause. message, prompt_id, sample: those of the first one."""

    boundary: str
    count: int
    message: str
    prompt_id: str
    sample: int

    def __str__(self) -> str:
        return f"{self.boundary}: {plain(self.message)}"

    @property
    def first(self) -> str:
        return f"{self} (first: {self.prompt_id}, sample {self.sample}; {self.count} in all)"


def failures(trajectories: Sequence[Trajectory]) -> list[Failure]:
    """Returns one failure for each boundary and cause, in the order in which they first occur.

    Messages that differ in numbers only have one cause. Of a boundary with more than CAUSES the rest is one failure.
    """
    found: dict[tuple[str, str], Failure] = {}
    for member in trajectories:
        if member.error is None:
            continue
        boundary = str(member.error.boundary)
        cause = boundary, _VARIES.sub("#", member.error.message)[:SHOWN_CHARS]
        if cause not in found and sum(failure.boundary == boundary for failure in found.values()) >= CAUSES:
            cause = boundary, ""
        if cause in found:
            found[cause] = replace(found[cause], count=found[cause].count + 1)
        else:
            found[cause] = Failure(
                boundary=boundary,
                count=1,
                message=member.error.message,
                prompt_id=member.prompt.id,
                sample=member.sample,
            )
    return list(found.values())


def summed_up(causes: Sequence[Failure], trajectories: int) -> str:
    """Returns one line for the user; empty if nothing failed.

    >>> one = Failure(boundary="reward", count=16, message="service says 503", prompt_id="p", sample=0)
    >>> summed_up([one], 16)
    '16 of 16 failed: reward: service says 503'
    """
    if not causes:
        return ""
    parts = [str(cause) if len(causes) == 1 else f"{cause} ({cause.count})" for cause in causes]
    return f"{sum(cause.count for cause in causes)} of {trajectories} failed: {'; '.join(parts)}"


def plain(text: str, limit: int = SHOWN_CHARS) -> str:
    r"""Returns a text as one printable line. A model, a service or a user's part may have written it.

    >>> plain("503\nbusy \x1b[2J")
    '503 busy \\x1b[2J'
    """
    return printable(" ".join(text.split())[:limit])
