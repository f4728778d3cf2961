"""What failed by our fault among trajectories, in words: counts and the first error of each boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.types import Trajectory
from sandbox.printable import printable

SHOWN_CHARS = 200  # of a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The trajectories that failed at one boundary. message, prompt_id, sample: of the first of them."""

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
    """Returns the failures by boundary, in the order of the first of each."""
    found: dict[str, Failure] = {}
    for member in trajectories:
        if member.error is None:
            continue
        boundary = str(member.error.boundary)
        if boundary in found:
            found[boundary] = replace(found[boundary], count=found[boundary].count + 1)
        else:
            found[boundary] = Failure(
                boundary=boundary,
                count=1,
                message=member.error.message,
                prompt_id=member.prompt.id,
                sample=member.sample,
            )
    return list(found.values())


def summed_up(found: Sequence[Failure], trajectories: int) -> str:
    """The line for the user; empty where nothing failed.

    >>> one = Failure(boundary="reward", count=16, message="service says 503", prompt_id="p", sample=0)
    >>> summed_up([one], 16)
    '16 of 16 failed: reward: service says 503'
    """
    if not found:
        return ""
    causes = [str(one) if len(found) == 1 else f"{one} ({one.count})" for one in found]
    return f"{sum(one.count for one in found)} of {trajectories} failed: {'; '.join(causes)}"


def plain(text: str, limit: int = SHOWN_CHARS) -> str:
    r"""One line of printable text: a model, a service or a user's part may have written it.

    >>> plain("503\nbusy \x1b[2J")
    '503 busy \\x1b[2J'
    """
    return printable(" ".join(text.split())[:limit])
