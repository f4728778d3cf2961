"""The record of a run on the disk while it grows: steps, timeline, rows, the index, and what is deleted of them.

Invariants
- After each write the folder is within its budget and the policy, unless the disk does not allow it.
- A resumed run continues the record of the killed one; a torn frame is cut off before anything follows it.

Blocking; made for one thread.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from engine.recording import files
from engine.recording.policy import RecordConfig, deletions, rows_to_drop
from engine.recording.reader import RecordedRun
from engine.recording.records import FORMAT, Index, Segment, StepRow

PROBLEMS = 100  # the most that the index names


class RecordFolder:
    """Writes the record below a run's folder. Call `open` first; each method raises OSError if the disk fails it."""

    def __init__(self, run: Path, config: RecordConfig) -> None:
        self.folder = files.folder_of(run)
        self.problems: list[str] = []
        self._config = config
        self._step_bytes: dict[int, int] = {}
        self._timeline_bytes: Counter[int] = Counter()
        self._row_bytes: dict[int, int] = {}
        self._cut: set[Path] = set()  # files whose end is whole
        self._last = 0

    def open(self, tokenizer: str | None) -> None:
        """Begins or continues the record. tokenizer: as `tokenizers` writes one to a file."""
        for name in ("steps", "timeline"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        fault = RecordedRun(self.folder.parent).fault
        if fault is not None:  # the run goes on, and so does its record, in today's format
            self.problems.append(fault)
        for draft in self.folder.rglob("*.draft"):
            draft.unlink(missing_ok=True)
        self._step_bytes = files.steps_in(self.folder)
        self._timeline_bytes = Counter(files.timeline_in(self.folder))
        self._last = max(self._step_bytes, default=0)
        rows = files.read_after(files.rows_path(self.folder), 0)[0]
        self._row_bytes = {row.step: len(files.packed(row)) for row in rows if isinstance(row, StepRow)}
        path = files.tokenizer_path(self.folder)
        if tokenizer is not None and not path.exists():
            files.write(path, [tokenizer.encode()])
        self._settle()

    def write_segment(self, segment: Segment) -> None:
        path = files.timeline_path(self.folder, segment.step)
        self._timeline_bytes[segment.step] += self._append(path, segment)
        self._settle()

    def write_step(self, row: StepRow, packed: Sequence[bytes]) -> None:
        """Writes a step and its row. packed: the step's groups, and then their tokens."""
        self._row_bytes[row.step] = self._append(files.rows_path(self.folder), row)
        self._thin_rows()
        path = files.step_path(self.folder, row.step)
        self._step_bytes[row.step] = files.write(path, [files.packed(row), *packed])
        self._last = row.step
        self._settle()

    def _append(self, path: Path, record: StepRow | Segment) -> int:
        if path not in self._cut:
            files.cut_torn(path)
            self._cut.add(path)
        return files.append_to(path, record)

    def _thin_rows(self) -> None:
        gone = set(rows_to_drop(self._row_bytes, self._config))
        if not gone:
            return
        path = files.rows_path(self.folder)
        rows = {row.step: row for row in files.read_after(path, 0)[0] if isinstance(row, StepRow)}
        kept = {step: files.packed(row) for step, row in sorted(rows.items()) if step not in gone}
        files.write(path, kept.values())
        self._row_bytes = {step: len(packed) for step, packed in kept.items()}

    def _settle(self) -> None:
        """Deletes the steps that the policy no longer keeps, and writes the index."""
        sizes = Counter(self._step_bytes) + self._timeline_bytes
        rows_bytes = sum(self._row_bytes.values())
        gone = deletions(sizes, self._config, rows_bytes)
        for step in gone:
            self._step_bytes.pop(step, None)
            self._timeline_bytes.pop(step, None)
            self._cut.discard(files.timeline_path(self.folder, step))
            for path in (files.step_path(self.folder, step), files.timeline_path(self.folder, step)):
                with suppress(FileNotFoundError):
                    path.unlink()
        index = Index(
            format=FORMAT,
            newest=self._config.newest,
            every=self._config.every,
            max_mb=self._config.max_mb,
            last=self._last,
            whole=tuple(sorted(self._step_bytes)),
            total_bytes=rows_bytes + sum(sizes[step] for step in sizes if step not in gone),
            problems=tuple(self.problems[-PROBLEMS:]),
        )
        draft = files.index_path(self.folder).with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(index))
        os.replace(draft, files.index_path(self.folder))
