"""Says which part of a recorded step can be read where its file is torn or damaged, for all who show or use a step."""

from __future__ import annotations

from dataclasses import dataclass

from engine.recording.reader import RecordedRun


@dataclass(frozen=True, slots=True)
class Readable:
    """How many groups of a step can be read, of those that it had.

    written: None where not even that is known. with_tokens: whether a group counts only if its tokens can be read, too.
    """

    step: int
    groups: int
    written: int | None
    with_tokens: bool = False

    @property
    def is_whole(self) -> bool:
        return self.written is not None and self.groups >= self.written

    @property
    def sentence(self) -> str:
        """Returns what can be read, in one line.

        >>> Readable(4, 12, 16).sentence
        'The record of step 4 is damaged: 12 of 16 groups of step 4 can be read.'
        """
        of = f"{self.groups:,} groups" if self.written is None else f"{self.groups:,} of {self.written:,} groups"
        tokens = " with their tokens" if self.with_tokens else ""
        return f"The record of step {self.step} is damaged: {of} of step {self.step} can be read{tokens}."


def readable(run: RecordedRun, step: int, groups: int, *, with_tokens: bool = False) -> Readable:
    """Returns what is known of a step of which so many groups were read."""
    written: int | None = run.groups_written(step)
    if not written:  # the first frame of the file is damaged; the rows of the run are in a file of their own
        written = next((len(row.groups) for row in run.rows() if row.step == step), None)
    return Readable(step, groups, written, with_tokens)


def damage(run: RecordedRun, step: int, groups: int, *, with_tokens: bool = False) -> list[str]:
    """Returns the sentence for a step of which not all groups were read; nothing if all were."""
    reading = readable(run, step, groups, with_tokens=with_tokens)
    return [] if reading.is_whole else [reading.sentence]


def groups_with_tokens(run: RecordedRun, step: int) -> int:
    """Returns how many groups of a step can be read together with their tokens."""
    return sum(run.tokens(step, recorded.number) is not None for recorded in run.groups(step))
