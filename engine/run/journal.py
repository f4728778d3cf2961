"""The journal of a run: the prompts, turns and grades of the steps that no checkpoint covers yet.

The journal is a cache on disk: callers get the recorded prompt or trajectory if there is one, and compute it otherwise.
A turn that had not ended is sampled again.

Invariants
- Records are append-only, have a checksum, and are written at once. They survive the death of this process, and after
  `sync` the death of the machine. A segment's damaged tail is cut off and reported; the work that it held is repeated.
- Each position of the prompt stream is drawn once, whatever happens in between. Before a checkpoint is begun, the
  positions that the steps before it drew are on disk in a file of their own. So a run resumes from that checkpoint
  without any older segment, and no prompt is ever drawn twice.
- Records are read back bit for bit, so a step that is trained again from them is the same step.

There is one file per step. `engine.run.journal_files` describes the files, `engine.run.journal_records` their contents.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from engine.atomic_files import append, sync_folder, write_whole, writing
from engine.encoding import encode, frame
from engine.run.checkpoints import Unresumable
from engine.run.journal_files import (
    Fault,
    Floor,
    delete,
    floors,
    read_floor,
    read_segments,
    read_whole,
    segment,
    segments,
    write_floor,
)
from engine.run.journal_records import (
    NO_MARK,
    Began,
    Decided,
    Drawn,
    Ended,
    Grown,
    Mark,
    Piece,
    Record,
    after,
    decode,
    decode_trajectories,
    join_pieces,
    moved,
    parts,
    size,
)
from engine.run.prompt_stream import skip
from engine.types import NO_PROMPT, Group, Prompt, Trajectory


class Log:
    """One trajectory in the journal: what was recorded of it before, and the place to record its progress.

    pieces, discarded: the state of an unfinished trajectory when the journal was opened. tokens: how many it had
    sampled by then. finished: the trajectory if it has ended, without its prompt; it is graded, unless its group is
    graded together.
    """

    __slots__ = ("_journal", "_key", "_mark", "discarded", "finished", "pieces", "tokens")

    def __init__(self, journal: Journal, key: tuple[int, int, int]) -> None:
        self._journal, self._key = journal, key
        self._mark: Mark = NO_MARK  # the size of the pieces together
        self.begin(0, 0, write=False)

    @property
    def on(self) -> bool:
        return self._journal.on

    def begin(self, discarded: int, tokens: int, *, write: bool = True) -> None:
        """Records that the trajectory begins again from its prompt."""
        self.pieces: list[Piece] = []
        self.finished: Trajectory | None = None
        self.discarded, self.tokens, self._mark = discarded, tokens, NO_MARK
        if write:
            lease, attempt, sample = self._key
            self._journal.write(Began(lease=lease, attempt=attempt, sample=sample, discarded=discarded, tokens=tokens))

    def grow(self, whole: Piece, tokens: int) -> None:
        """Records that a turn has ended. whole: the trajectory so far."""
        if self.on:
            lease, attempt, sample = self._key
            piece = after(whole, self._mark)
            self._mark = size(whole)
            self._journal.write(Grown(lease=lease, attempt=attempt, sample=sample, piece=piece, tokens=tokens))

    def end(self, trajectory: Trajectory, tokens: int) -> None:
        """Records that the trajectory has ended, with its reward.

        If its group is graded together, this is called twice: without a reward at the end, and again with it.
        """
        if self.on:
            lease, attempt, sample = self._key
            rest = replace(after(trajectory, self._mark), prompt=NO_PROMPT)
            self._journal.write(Ended(lease=lease, attempt=attempt, sample=sample, trajectory=rest, tokens=tokens))

    def read(self, record: Grown | Began | Ended) -> None:
        """Applies a record that was read from the disk."""
        match record:
            case Grown():
                self.pieces.append(record.piece)
                self._mark = moved(self._mark, record.piece)
            case Began():
                self.begin(record.discarded, record.tokens, write=False)
            case Ended():
                joined = join_pieces([*self.pieces, Piece(**parts(record.trajectory))])
                self.finished = replace(record.trajectory, **parts(joined))
        self.tokens = record.tokens


class Journal:
    """Reads and writes the journal in a folder; folder None remembers nothing.

    groups_per_step: a lease belongs to step lease // groups_per_step. first_step: the number of steps that the run's
    checkpoint covers; only later records are read, and a damaged tail among them is cut off. faults: the damage that
    was met in segments.

    Raises Unresumable if the positions drawn before are unknown, or for records of another version. Every method that
    writes raises CannotWrite.
    """

    def __init__(self, folder: Path | None = None, groups_per_step: int = 1, first_step: int = 0) -> None:
        self.folder = folder
        self.faults: list[Fault] = []
        self._groups_per_step = groups_per_step
        self._floor = Floor(step=0, position=0, undrawn=())
        self._positions: dict[tuple[int, int], int] = {}  # (lease, attempt) -> prompts drawn; since the floor
        self._drawn: dict[tuple[int, int], Prompt] = {}
        self._logs: dict[tuple[int, int, int], Log] = {}
        self._decided: dict[tuple[int, int], Decided] = {}
        self._records: dict[tuple[int, int], list[Record]] = {}  # by trajectory, in the order of the files
        self._files: dict[int, int] = {}  # descriptors by step
        if folder is not None:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            self._floor = read_floor(folder, first_step)
            for step, payloads, fault in read_segments(folder, first_step):
                if fault is not None:
                    self.faults.append(fault)
                if step >= first_step:
                    self._read(segment(folder, step), payloads)
                    self._cut_off(fault)
        drawn = set(self._positions.values())
        self.position = max([self._floor.position, *(position + 1 for position in drawn)])  # prompts drawn so far
        # Positions below it whose record was lost; they are drawn first.
        self._lost = sorted(self._floor.open(self.position) - drawn)

    @property
    def on(self) -> bool:
        return self.folder is not None

    @property
    def held(self) -> tuple[int, int]:
        """How many trajectories had ended, and how many were under way, when the journal was opened."""
        ended = sum(log.finished is not None for log in self._logs.values())
        return ended, len(self._logs) - ended

    def held_of(self, step: int) -> int:
        """Returns how many trajectories of this step, ended or not, the journal held when it was opened."""
        return sum(lease // self._groups_per_step == step for lease, _, _ in self._logs)

    def after(self, prompts: Iterator[Prompt]) -> Iterator[Prompt]:
        """Returns the rest of a prompt stream that stands at its start: without the prompts drawn before."""
        lost = set(self._lost)
        passed = skip(prompts, min(lost, default=self.position))
        numbered = enumerate(prompts, start=passed)
        return (prompt for number, prompt in numbered if number >= self.position or number in lost)

    def draw(self, lease: int, attempt: int, prompts: Iterator[Prompt]) -> Prompt | None:
        """Returns the recorded prompt of this attempt, else the next one of the stream; None at its end."""
        prompt = self._drawn.get((lease, attempt))
        if prompt is None and (prompt := next(prompts, None)) is not None:
            position = self._lost.pop(0) if self._lost else self.position
            self.position = max(self.position, position + 1)
            if self.on:
                self._positions[lease, attempt] = position
            self.write(Drawn(lease=lease, attempt=attempt, position=position, prompt=prompt))
        return prompt

    def log(self, lease: int, attempt: int, sample: int) -> Log:
        """Returns the log of a trajectory, an empty one if nothing of it was recorded."""
        return self._logs.get((lease, attempt, sample)) or Log(self, (lease, attempt, sample))

    def ended(self, lease: int, attempt: int) -> list[int]:
        """Returns the samples that have ended, in the order of their ends, without those that failed by our fault."""
        return [
            key[2]
            for key, log in self._logs.items()
            if key[:2] == (lease, attempt) and log.finished is not None and log.finished.error is None
        ]

    def records(self, lease: int, attempt: int) -> list[Record]:
        """Returns the records that were read of this attempt's trajectories, in order."""
        return list(self._records.get((lease, attempt), ()))

    def decide(self, group: Group, attempt: int) -> None:
        """Records that a group is complete, before selection."""
        members = tuple(member.sample for member in group.trajectories)
        waste = dict(group.waste)
        self.write(Decided(lease=group.lease, attempt=attempt, members=members, drop=group.drop, waste=waste))

    def decided(self, lease: int, attempt: int) -> Group | None:
        """Returns the group as it was recorded, None if it was not complete."""
        record = self._decided.get((lease, attempt))
        if record is None:
            return None
        prompt = self._drawn[lease, attempt]
        logs = [self._logs[lease, attempt, sample] for sample in record.members]
        members = tuple(replace(log.finished, prompt=prompt) for log in logs if log.finished is not None)
        assert len(members) == len(logs), record
        return Group(prompt=prompt, trajectories=members, lease=lease, drop=record.drop, waste=record.waste)

    def write(self, record: Record) -> None:
        """Appends a record. When this returns, the operating system has it."""
        if self.folder is None:
            return
        step = self._step(record.lease)
        with writing(path := segment(self.folder, step)):
            if step not in self._files:
                self._files[step] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            append(self._files[step], frame(encode(record)))

    def floor(self, step: int) -> Floor:
        """Returns which positions the steps (from 0) before this one drew. All their groups must be complete."""
        before = {position for (lease, _), position in self._positions.items() if self._step(lease) < step}
        return Floor(step=step, position=self.position, undrawn=tuple(sorted(self._floor.open(self.position) - before)))

    def sync(self, floor: Floor) -> None:
        """Blocks until the records, and then the floor, are on the disk.

        A record that is written meanwhile may or may not be among them.
        """
        if self.folder is not None:
            with writing(self.folder):
                for file in list(self._files.values()):
                    os.fsync(file)
                sync_folder(self.folder)
            write_floor(self.folder, floor)

    def forget(self, step: int) -> None:
        """Deletes the records of all steps (from 0) before this one.

        A checkpoint must cover them, and its floor must be on the disk.
        """
        if self.folder is None:
            return
        self._floor = self.floor(step)
        for closed in [each for each in self._files if each < step]:
            os.close(self._files.pop(closed))
        delete(self.folder, {each for each in (*segments(self.folder), *floors(self.folder)) if each < step})
        self._positions = {key: position for key, position in self._positions.items() if self._step(key[0]) >= step}
        self._drawn = {key: prompt for key, prompt in self._drawn.items() if self._step(key[0]) >= step}
        self._logs = {key: log for key, log in self._logs.items() if self._step(key[0]) >= step}
        self._decided = {key: record for key, record in self._decided.items() if self._step(key[0]) >= step}
        self._records = {key: read for key, read in self._records.items() if self._step(key[0]) >= step}

    def keep(self, name: str, trajectories: list[Trajectory]) -> None:
        """Writes trajectories, such as those of an evaluation, under a name; replaces what was there."""
        if self.folder is not None:
            write_whole(self.folder / name, [frame(encode(trajectories))])

    def kept(self, name: str) -> list[Trajectory] | None:
        """Returns the trajectories under a name; None if there are none, or they are damaged."""
        if self.folder is None:
            return None
        try:
            payload = read_whole(self.folder / name)
            return None if payload is None else decode_trajectories(payload)
        except (Unresumable, msgspec.DecodeError):  # a disk that fails; another version
            return None

    def take(self, record: Record) -> None:
        """Applies a record as if it had been read from the disk."""
        match record:
            case Drawn():
                self._drawn[record.lease, record.attempt] = record.prompt
                self._positions[record.lease, record.attempt] = record.position
            case Decided():
                self._decided[record.lease, record.attempt] = record
            case Grown() | Began() | Ended():
                self._records.setdefault((record.lease, record.attempt), []).append(record)
                key = record.lease, record.attempt, record.sample
                # The log moves to the end: `ended` returns the samples in the order of their ends.
                log = self._logs[key] = self._logs.pop(key, Log(self, key))
                log.read(record)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _step(self, lease: int) -> int:
        return lease // self._groups_per_step

    def _read(self, path: Path, payloads: list[bytes]) -> None:
        for payload in payloads:
            try:
                self.take(decode(payload))
            except msgspec.DecodeError as error:
                raise Unresumable(f"{path} is of another version of this program: {error}") from error

    def _cut_off(self, fault: Fault | None) -> None:
        """Cuts a damaged tail off, so that the next record follows the last whole one."""
        if fault is not None and fault.at is not None:
            with writing(fault.path):
                os.truncate(fault.path, fault.at)
