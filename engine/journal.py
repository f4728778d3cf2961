"""The journal of a run: what was drawn, rolled out and graded for steps that no checkpoint covers yet.

Invariants
- Append-only records with a checksum, written at once: they survive the death of this process, and after a `sync` that
  of the machine. A tail that is torn is cut and counted; nothing after it is read.
- A position of the prompt stream is drawn once, whatever happens between.
- What is read back is what was written, to the last bit: a step that is trained again from it is the same step.

A journal is a memo: who asks for a prompt or a trajectory gets what it holds, and does the work otherwise. What was
sampled in a turn that had not ended is sampled again.

One file per step (`engine.journal_records` says what is in it).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from engine.data import skip
from engine.disk import append, sync_folder, write_whole, writing
from engine.journal_records import (
    Began,
    Decided,
    Drawn,
    Ended,
    Grown,
    Mark,
    Piece,
    Position,
    Record,
    after,
    decode,
    decode_trajectories,
    encode,
    encode_trajectories,
    join_pieces,
    parts,
    size,
)
from engine.types import Group, Prompt, Trajectory

_NOBODY = Prompt(id="", messages=(), answer="")  # the prompt is in the record of its draw


class Log:
    """One trajectory in the journal: what it holds of it, and where its progress goes.

    pieces, discarded: of a trajectory that has not ended; what it was when the journal was opened. tokens: sampled
    until then. finished: it has ended, graded, without its prompt.
    """

    __slots__ = ("_journal", "_key", "_mark", "discarded", "finished", "pieces", "tokens")

    def __init__(self, journal: Journal, key: tuple[int, int, int]) -> None:
        self._journal, self._key = journal, key
        self._mark: Mark = (0, 0, 0)  # what pieces hold
        self.begin(0, 0, write=False)

    @property
    def on(self) -> bool:
        return self._journal.on

    def begin(self, discarded: int, tokens: int, *, write: bool = True) -> None:
        """It begins again from its prompt."""
        self.pieces: list[Piece] = []
        self.finished: Trajectory | None = None
        self.discarded, self.tokens, self._mark = discarded, tokens, (0, 0, 0)
        if write:
            lease, attempt, sample = self._key
            self._journal.write(Began(lease=lease, attempt=attempt, sample=sample, discarded=discarded, tokens=tokens))

    def grow(self, whole: Piece, tokens: int) -> None:
        """A turn has ended. whole: everything so far."""
        if self.on:
            lease, attempt, sample = self._key
            piece = after(whole, self._mark)
            self._mark = size(whole)
            self._journal.write(Grown(lease=lease, attempt=attempt, sample=sample, piece=piece, tokens=tokens))

    def end(self, trajectory: Trajectory, tokens: int) -> None:
        """It has ended and was graded."""
        if self.on:
            lease, attempt, sample = self._key
            rest = replace(after(trajectory, self._mark), prompt=_NOBODY)
            self._journal.write(Ended(lease=lease, attempt=attempt, sample=sample, trajectory=rest, tokens=tokens))

    def read(self, record: Grown | Began | Ended) -> None:
        match record:
            case Grown():
                self.pieces.append(record.piece)
                tokens, turns, characters = size(record.piece)
                self._mark = self._mark[0] + tokens, self._mark[1] + turns, self._mark[2] + characters
            case Began():
                self.begin(record.discarded, record.tokens, write=False)
            case Ended():
                joined = join_pieces([*self.pieces, Piece(**parts(record.trajectory))])
                self.finished = replace(record.trajectory, **parts(joined))
        self.tokens = record.tokens


class Journal:
    """folder None: remembers nothing. groups_per_step: a lease belongs to step lease // groups_per_step.

    Opening reads what is there. torn_bytes: what was cut off. Raises DiskFull from every method that writes.
    """

    def __init__(self, folder: Path | None = None, groups_per_step: int = 1) -> None:
        self.folder = folder
        self.position = 0  # prompts drawn so far
        self.torn_bytes = 0
        self._lost: list[int] = []  # positions below it whose record was lost with the machine: drawn first
        self._groups_per_step = groups_per_step
        self._drawn: dict[tuple[int, int], Prompt] = {}
        self._logs: dict[tuple[int, int, int], Log] = {}
        self._decided: dict[tuple[int, int], Decided] = {}
        self._files: dict[int, int] = {}  # descriptors by step
        if folder is not None:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            drawn, floor = set[int](), 0
            for path in sorted(folder.glob("step-*")):
                for record in self._read(path):
                    if isinstance(record, Drawn):
                        drawn.add(record.position)
                    elif isinstance(record, Position):
                        floor = max(floor, record.position)
            self.position = max(drawn | {floor - 1}) + 1
            self._lost = sorted(set(range(floor, self.position)) - drawn)

    @property
    def on(self) -> bool:
        return self.folder is not None

    @property
    def first_step(self) -> int | None:
        """The first step (from 0) of which it knows; None when it is empty."""
        return min(map(_step, self.folder.glob("step-*")), default=None) if self.folder else None

    def held(self, step: int) -> tuple[int, int]:
        """(trajectories that had ended, that were under way) of this step and later ones when it was opened."""
        logs = [log for (lease, _, _), log in self._logs.items() if lease >= step * self._groups_per_step]
        ended = sum(log.finished is not None for log in logs)
        return ended, len(logs) - ended

    def held_of(self, step: int) -> int:
        """Trajectories of this step, ended or not, that were there when it was opened."""
        return sum(lease // self._groups_per_step == step for lease, _, _ in self._logs)

    def after(self, prompts: Iterator[Prompt]) -> Iterator[Prompt]:
        """A prompt stream from its start, without what was drawn of it."""
        lost = set(self._lost)
        passed = skip(prompts, min(lost, default=self.position))
        numbered = enumerate(prompts, start=passed)
        return (prompt for number, prompt in numbered if number >= self.position or number in lost)

    def draw(self, lease: int, attempt: int, prompts: Iterator[Prompt]) -> Prompt | None:
        """The prompt of this attempt: the one it had, else the next one; None when there is none."""
        found = self._drawn.get((lease, attempt))
        if found is None and (found := next(prompts, None)) is not None:
            position = self._lost.pop(0) if self._lost else self.position
            self.position = max(self.position, position + 1)
            self.write(Drawn(lease=lease, attempt=attempt, position=position, prompt=found))
        return found

    def log(self, lease: int, attempt: int, sample: int) -> Log:
        return self._logs.get((lease, attempt, sample)) or Log(self, (lease, attempt, sample))

    def ended(self, lease: int, attempt: int) -> list[int]:
        """Samples that have ended, in the order of their ends; without those that failed by our fault."""
        return [
            key[2]
            for key, log in self._logs.items()
            if key[:2] == (lease, attempt) and log.finished is not None and log.finished.error is None
        ]

    def decide(self, group: Group, attempt: int) -> None:
        """A group is made, before selection."""
        members = tuple(member.sample for member in group.trajectories)
        waste = dict(group.waste)
        self.write(Decided(lease=group.lease, attempt=attempt, members=members, drop=group.drop, waste=waste))

    def decided(self, lease: int, attempt: int) -> Group | None:
        """The group as it was made."""
        record = self._decided.get((lease, attempt))
        if record is None:
            return None
        prompt = self._drawn[lease, attempt]
        logs = [self._logs[lease, attempt, sample] for sample in record.members]
        members = tuple(replace(log.finished, prompt=prompt) for log in logs if log.finished is not None)
        assert len(members) == len(logs), record
        return Group(prompt=prompt, trajectories=members, lease=lease, drop=record.drop, waste=record.waste)

    def write(self, record: Record) -> None:
        """Appends; the operating system has the record when this returns."""
        if self.folder is None:
            return
        step = record.lease // self._groups_per_step
        with writing(path := self.folder / f"step-{step:06d}"):
            if step not in self._files:
                self._files[step] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            append(self._files[step], encode(record))

    def forget(self, step: int) -> None:
        """Deletes the segments of steps (from 0) before this one: a checkpoint covers them."""
        if self.folder is None or (first := self.first_step) is None or first >= step:
            return
        self.write(Position(lease=step * self._groups_per_step, attempt=0, position=self.position))
        self.sync()  # else a machine that dies may have deleted the draws and not written that they were made
        for path in self.folder.glob("step-*"):
            if _step(path) < step:
                if (file := self._files.pop(_step(path), None)) is not None:
                    os.close(file)
                path.unlink()
        floor = step * self._groups_per_step
        self._drawn = {key: prompt for key, prompt in self._drawn.items() if key[0] >= floor}
        self._logs = {key: log for key, log in self._logs.items() if key[0] >= floor}
        self._decided = {key: record for key, record in self._decided.items() if key[0] >= floor}

    def sync(self) -> None:
        """On the disk when this returns. Blocks; nothing may be written meanwhile to be counted on."""
        if self.folder is not None:
            with writing(self.folder):
                for file in list(self._files.values()):
                    os.fsync(file)
                sync_folder(self.folder)

    def keep(self, name: str, trajectories: list[Trajectory]) -> None:
        """Holds trajectories under a name (those of an evaluation, say), in place of what was there."""
        if self.folder is not None:
            write_whole(self.folder / name, [encode_trajectories(trajectories)])

    def kept(self, name: str) -> list[Trajectory] | None:
        path = self.folder / name if self.folder else None
        return decode_trajectories(path.read_bytes()) if path and path.exists() else None

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _read(self, path: Path) -> Iterator[Record]:
        """Takes the records of a segment in, and cuts its torn tail off."""
        data, good = path.read_bytes(), 0
        for record, end in decode(data):
            good = end
            yield record
            match record:
                case Drawn():
                    self._drawn[record.lease, record.attempt] = record.prompt
                case Decided():
                    self._decided[record.lease, record.attempt] = record
                case Grown() | Began() | Ended():
                    key = record.lease, record.attempt, record.sample
                    # last now: `ended` gives the order of the ends
                    log = self._logs[key] = self._logs.pop(key, Log(self, key))
                    log.read(record)
        if good < len(data):
            self.torn_bytes += len(data) - good
            with writing(path):
                os.truncate(path, good)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
