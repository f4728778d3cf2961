"""Reads a recorded run, finished, crashed or under way, from its files alone.

    run = RecordedRun(Path("runs/quickstart"))
    for group in run.groups(run.steps[-1]):
        print(group.prompt_id, [member.reward for member in group.trajectories])
        tokens = run.tokens(group.step, group.group)
    for segment in run.timeline(11, 12):
        print(segment.step, len(segment.spans))

Nothing here imports torch or vLLM. Nothing raises for what is missing or torn: what is there is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from engine.recording import files
from engine.recording.records import GroupRecord, GroupTokens, Index, Segment, StepRow


class RecordedRun:
    """run: the run's folder. Each property looks at the disk: of a run that goes on they grow, and old steps vanish."""

    def __init__(self, run: Path) -> None:
        self.folder = files.folder_of(run)
        self._rows: dict[int, StepRow] = {}
        self._rows_end = 0

    @property
    def is_there(self) -> bool:
        """Whether the run was recorded."""
        return self.folder.is_dir()

    @property
    def index(self) -> Index | None:
        """The policy, what is kept, and what went wrong. None where there is none yet."""
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(files.index_path(self.folder).read_bytes(), type=Index)
        return None

    @property
    def tokenizer(self) -> Path | None:
        """A file for `tokenizers.Tokenizer.from_file`, if there is one."""
        path = files.tokenizer_path(self.folder)
        return path if path.is_file() else None

    @property
    def steps(self) -> list[int]:
        """The steps (from 1) that are kept whole, ascending."""
        return list(files.steps_in(self.folder))

    def rows(self) -> list[StepRow]:
        """A row for each step so far, ascending. Reads only what has come since the last call."""
        found, self._rows_end = files.read_after(files.rows_path(self.folder), self._rows_end)
        self._rows |= {row.step: row for row in found if isinstance(row, StepRow)}
        return [self._rows[step] for step in sorted(self._rows)]

    def groups(self, step: int) -> list[GroupRecord]:
        """The groups of a step in admission order, without tokens; none where it is not kept whole."""
        found = files.read_frames(files.step_path(self.folder, step), 1, self._groups_of(step))
        return [record for record in found if isinstance(record, GroupRecord)]

    def tokens(self, step: int, group: int) -> GroupTokens | None:
        """The tokens of one group of a step (its number within it); None where they are not there."""
        first = 1 + self._groups_of(step) + group
        found = files.read_frames(files.step_path(self.folder, step), first, 1)
        return found[0] if found and isinstance(found[0], GroupTokens) else None

    def _groups_of(self, step: int) -> int:
        found = files.read_frames(files.step_path(self.folder, step), 0, 1)
        return len(found[0].groups) if found and isinstance(found[0], StepRow) else 0

    @property
    def segments(self) -> dict[int, int]:
        """{number: step} of the timeline's segments, ascending."""
        return {number: step for number, (step, _) in files.segments_in(self.folder).items()}

    def segment(self, number: int, step: int) -> Segment | None:
        """None where it is not there (any more), or not whole."""
        found = files.read(files.segment_path(self.folder, number, step))
        return found[0] if found and isinstance(found[0], Segment) else None

    def timeline(self, first: int, last: int) -> Iterator[Segment]:
        """The segments of the steps from first to last, both included, in order."""
        for number, step in self.segments.items():
            if first <= step <= last and (found := self.segment(number, step)) is not None:
                yield found
