"""A file with a row for each problem that a job has sampled.

Invariant: a row is on the disk before its problem counts as done, and a row that was cut in half by a kill is cut off.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from algo.reward.answers import boxed_answer, final_turn
from engine.atomic_files import append, sync_folder, writing
from engine.errors import BadInput
from engine.types import Trajectory


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What a model did with one problem. Tuples have an entry for each sample, in order.

    solved: how many samples are right. answers: what is boxed, None where nothing is. tokens: sampled.
    """

    id: str
    solved: int
    samples: int
    answers: tuple[str | None, ...]
    rewards: tuple[float, ...]
    tokens: tuple[int, ...]
    turns: tuple[int, ...]
    calls: tuple[int, ...]
    failed_calls: tuple[int, ...]
    stops: tuple[str, ...]

    @classmethod
    def of(cls, members: list[Trajectory]) -> Self:
        rewards = tuple(member.reward or 0.0 for member in members)
        return cls(
            id=members[0].prompt.id,
            solved=sum(reward > 0 for reward in rewards),
            samples=len(members),
            answers=tuple(boxed_answer(final_turn(member)) for member in members),
            rewards=rewards,
            tokens=tuple(member.sampled_tokens for member in members),
            turns=tuple(len(member.turns) for member in members),
            calls=tuple(len(member.tool_uses) for member in members),
            failed_calls=tuple(sum(use.failed for use in member.tool_uses) for member in members),
            stops=tuple(str(member.stop) for member in members),
        )


_row = msgspec.json.Decoder(Row)


class RowFile:
    """Holds the rows of a job that may have been interrupted: `with RowFile(path) as file`.

    done: ids of their problems.

    A line that was cut in half by a kill is cut off. Raises BadInput for another damaged line, or when another process
    writes the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(path)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._file, _whole_lines(path))
            sync_folder(path.parent)
        try:
            self.done = {row.id for row in self.rows()}
        except BadInput:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._file)
        os.close(self._lock)

    def rows(self) -> Iterator[Row]:
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield _row.decode(line)
                except msgspec.DecodeError as error:
                    raise BadInput(
                        f"{self.path}, line {number}: {error}. Fix: remove the file to begin anew"
                    ) from error

    async def add(self, row: Row) -> None:
        """Adds a row, which is on the disk when this returns."""
        with writing(self.path):
            append(self._file, msgspec.json.encode(row) + b"\n")
            await asyncio.to_thread(os.fsync, self._file)
        self.done.add(row.id)


def _locked(path: Path) -> int:
    """Returns a lock that is held until its descriptor is closed or the process ends.

    It has a file of its own, since closing another descriptor of the same file would release it.
    """
    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise BadInput(f"{path} is written by another process. Fix: wait for it, or another output=") from error
    return lock


def _whole_lines(path: Path) -> int:
    """Returns the number of bytes up to the end of the last whole line."""
    with path.open("rb") as file:
        end = 0
        for line in file:
            end += len(line) if line.endswith(b"\n") else 0
    return end
