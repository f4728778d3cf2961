"""Reads a recorded run, finished, crashed or under way, from its files alone.

    run = RecordedRun(Path("runs/quickstart"))
    for recorded in run.groups(run.steps[-1]):
        print(recorded.group.prompt.id, recorded.group.rewards_G)
        tokens = run.tokens(recorded.step, recorded.number)
    for segment in run.timeline(11, 12):
        print(segment.step, len(segment.spans))

Nothing here imports torch or vLLM. Nothing but `find` raises for files that are missing or torn: readers get what is
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from engine.errors import BadInput
from engine.recording import files
from engine.recording.columns import TimelineColumns, columns_of
from engine.recording.outlines import RecordedOutline, outlines_of
from engine.recording.records import FORMAT, GroupTokens, Index, RecordedGroup, Segment, StepRow
from engine.recording.soundness import belong


class _Version(msgspec.Struct):
    """What an index of any version has."""

    format: int


class RecordedRun:
    """The record below a run's folder. Each property looks at the disk: while the run goes on, steps come and go."""

    def __init__(self, run: Path) -> None:
        self.folder = files.folder_of(run)
        self._rows: dict[int, StepRow] = {}
        self._rows_end = 0
        self._rows_file = 0  # its number on the file system

    @property
    def is_there(self) -> bool:
        """Returns whether the run was recorded."""
        return self.folder.is_dir()

    @property
    def fault(self) -> str | None:
        """Says why the record cannot be read if another version of this program wrote it; None if it can."""
        path = files.index_path(self.folder)
        with suppress(OSError, ValueError, RecursionError):
            written = msgspec.json.decode(path.read_bytes(), type=_Version).format
            if written != FORMAT:
                return (
                    f"{self.folder} has format {written}, and this version reads format {FORMAT}. "
                    "Fix: look at this run with the version that made it"
                )
        return None

    def find(self, step: int | None = None) -> int:
        """Returns the step, or the newest one if none is given. Raises BadInput if it is not kept whole; the message
        lists the steps that are.
        """
        if (fault := self.fault) is not None:
            raise BadInput(fault)
        if not (steps := self.steps):
            raise BadInput(f"{self.folder} holds no step. Fix: name a run that was recorded (record.max_mb above 0)")
        if step is not None and step not in steps:
            raise BadInput(f"{self.folder} has no step {step}. Fix: one of {', '.join(map(str, steps))}")
        return steps[-1] if step is None else step

    @property
    def index(self) -> Index | None:
        """Returns the policy, what is kept, and what went wrong; None if no index is there yet."""
        with suppress(OSError, ValueError, RecursionError):  # msgspec lets through what is not its own
            return msgspec.json.decode(files.index_path(self.folder).read_bytes(), type=Index)
        return None

    @property
    def tokenizer(self) -> Path | None:
        """Returns a file for `tokenizers.Tokenizer.from_file`, if there is one."""
        path = files.tokenizer_path(self.folder)
        return path if path.is_file() else None

    @property
    def steps(self) -> list[int]:
        """Returns the steps (from 1) that are kept whole, ascending."""
        return list(files.steps_in(self.folder))

    def rows(self) -> list[StepRow]:
        """Returns a row for each step so far, ascending. Reads only what has come since the last call."""
        number = files.number_of(files.rows_path(self.folder))
        if number != self._rows_file:  # it was written anew, with fewer rows
            self._rows_file, self._rows_end = number, 0
        records, self._rows_end = files.read_after(files.rows_path(self.folder), self._rows_end)
        self._rows |= {row.step: row for row in records if isinstance(row, StepRow)}
        return [self._rows[step] for step in sorted(self._rows)]

    def groups(self, step: int) -> list[RecordedGroup]:
        """Returns the groups of a step in admission order, without tokens; none if it is not kept whole."""
        path = files.step_path(self.folder, step)
        records = files.read_frames(path, 1, files.groups_in(path, step))
        return [
            record
            for number, record in enumerate(records)
            if isinstance(record, RecordedGroup) and (record.step, record.number) == (step, number)
        ]

    def group(self, step: int, number: int) -> RecordedGroup | None:
        """Returns one of `groups` by its number; None if it is not there."""
        path = files.step_path(self.folder, step)
        if not 0 <= number < files.groups_in(path, step):
            return None
        records = files.read_frames(path, 1 + number, 1)
        if (
            records
            and isinstance(record := records[0], RecordedGroup)
            and (record.step, record.number) == (step, number)
        ):
            return record
        return None

    def outlines(self, step: int) -> Sequence[RecordedOutline]:
        """Returns what `groups` does without texts, in a fifth of the time; the newest ones stay in memory."""
        return outlines_of(self.folder, step)

    def groups_written(self, step: int) -> int:
        """Returns how many groups the step had, of which a torn file may hold fewer; 0 if it is not kept whole."""
        return files.groups_in(files.step_path(self.folder, step), step)

    def tokens(self, step: int, group: int) -> GroupTokens | None:
        """Returns the tokens of a group by its number in the step; None if they are not there."""
        path, owner = files.step_path(self.folder, step), self.group(step, group)
        if owner is None:
            return None
        tokens = files.read_frames(path, 1 + files.groups_in(path, step) + group, 1)
        if not tokens or not isinstance(tokens[0], GroupTokens):
            return None
        return tokens[0] if belong(owner, tokens[0]) else None

    @property
    def timeline_steps(self) -> list[int]:
        """Returns the steps whose timeline is there, ascending; 0 stands for the time before the first."""
        return list(files.timeline_in(self.folder))

    def timeline(self, first: int, last: int) -> Iterator[Segment]:
        """Yields the segments of the steps from first to last, both included, in order."""
        for step in self.timeline_steps:
            if first <= step <= last:
                yield from self.timeline_after(step, 0)[0]

    def columns(self, first: int, last: int) -> TimelineColumns | None:
        """Returns what `timeline` does as columns, in a third of the time; None if nothing of it is there."""
        return columns_of(self.folder, first, last)

    def timeline_after(self, step: int, offset: int) -> tuple[list[Segment], int]:
        """Returns the segments of a step after an offset, and the offset to continue from while the run goes on."""
        records, end = files.read_after(files.timeline_path(self.folder, step), offset)
        return [record for record in records if isinstance(record, Segment) and record.step == step], end

    def newest(self, events: int) -> list[Segment]:
        """Returns the timeline of the newest steps, as many as hold about so many events, in order."""
        newest: list[Segment] = []
        for step in reversed(self.timeline_steps):
            segments, _ = self.timeline_after(step, 0)
            events -= sum(len(segment.spans) + len(segment.instants) for segment in segments)
            events -= sum(2 * len(steps.at) for segment in segments for steps in segment.engine_steps)
            if newest and events < 0:
                break
            newest = [*segments, *newest]
        return newest
