"""Graded samples of many problems, a row of a file for each problem: what filters and evaluations go by.

Invariants
- A row is on the disk before its problem counts as done. A job that was killed goes on with the others and ends with
  the rows that it would have had: the seeds of a sample come from its problem's id.
- At most `in_flight` trajectories are under way (or the samples of one problem), whatever the number of problems.
- A sample that our infrastructure failed is tried again. A problem that cannot be sampled gets no row: it is never
  counted as wrong, and the same command tries it again.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from algo.reward.answers import boxed_answer
from engine.atomic_files import append, sync_folder, write_whole, writing
from engine.console.shown import shown
from engine.errors import BadInput, first_error
from engine.ports import Reward
from engine.replica.port import ReplicaDied
from engine.stages.grading import graded
from engine.telemetry.timeline import Timeline
from engine.types import Boundary, Prompt, Trajectory

TRIES = 3  # of a sample that our infrastructure failed
GRADERS = 8  # trajectories graded at once; the others wait, which no deadline of a grade covers


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
            answers=tuple(boxed_answer(member.text) for member in members),
            rewards=rewards,
            tokens=tuple(member.sampled_tokens for member in members),
            turns=tuple(len(member.turns) for member in members),
            calls=tuple(len(member.tool_uses) for member in members),
            failed_calls=tuple(sum(use.failed for use in member.tool_uses) for member in members),
            stops=tuple(str(member.stop) for member in members),
        )


_row = msgspec.json.Decoder(Row)


class RowFile:
    """`with RowFile(path) as file`: the rows of a job that may have been interrupted. done: ids of their problems.

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
        """The row is on the disk when this returns."""
        with writing(self.path):
            append(self._file, msgspec.json.encode(row) + b"\n")
            await asyncio.to_thread(os.fsync, self._file)
        self.done.add(row.id)


def _locked(path: Path) -> int:
    """Held until the descriptor is closed, or the process ends; by a file of its own, since others are opened again."""
    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise BadInput(f"{path} is written by another process. Fix: wait for it, or another output=") from error
    return lock


def _whole_lines(path: Path) -> int:
    """Bytes up to the end of the last line that ends."""
    with path.open("rb") as file:
        end = 0
        for line in file:
            end += len(line) if line.endswith(b"\n") else 0
    return end


class Samples(Protocol):
    """Where samples come from: the rollouts of `engine.rollout.rollout`, or those of `remote.py`."""

    async def run(self, prompt: Prompt, sample: int, group: int) -> Trajectory: ...


async def sample_problems(
    prompts: Iterable[Prompt],
    file: RowFile,
    *,
    samples: int,
    rollouts: Samples,
    reward: Reward,
    timeline: Timeline,
    in_flight: int,
    on_done: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """A row for each of the prompts; those that have one are passed over. on_done: called after each that has not.

    Returns the problems that could not be sampled, each with its error. Raises ReplicaDied when no replica is left.
    """
    todo = enumerate(prompt for prompt in prompts if prompt.id not in file.done)
    grading = asyncio.Semaphore(GRADERS)
    failed: dict[str, str] = {}

    async def work() -> None:
        for number, prompt in todo:  # the workers share it
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(_sample(prompt, sample, number), name=f"sample-{prompt.id}-{sample}")
                    for sample in range(samples)
                ]
            members = [task.result() for task in running]
            errors = [member.error for member in members if member.error is not None]
            if errors:
                failed[prompt.id] = f"{errors[0].boundary}: {errors[0].message}"
            else:
                await file.add(Row.of(members))
            on_done()

    async def _sample(prompt: Prompt, sample: int, number: int) -> Trajectory:
        for _ in range(TRIES):
            trajectory = await rollouts.run(prompt, sample, number)
            async with grading:
                trajectory = await graded(trajectory, reward, timeline)
            if trajectory.error is None:
                break
            if trajectory.error.boundary is Boundary.REPLICA:  # the fleet has tried all that it has
                raise ReplicaDied(trajectory.error.message)
        return trajectory

    try:
        async with asyncio.TaskGroup() as workers:
            for number in range(max(1, in_flight // samples)):
                workers.create_task(work(), name=f"problems-{number}")
    except BaseExceptionGroup as failures:
        raise first_error(failures) from failures
    return failed


def open_output(folder: Path, identity: Mapping[str, Any]) -> None:
    """Makes the folder of a job, or goes on with it. Raises BadInput where it holds rows of a job of other values."""
    wanted = msgspec.json.decode(msgspec.json.encode(identity, enc_hook=str))
    path = folder / "config.json"
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        if not any(rows.stat().st_size for rows in folder.glob("*.jsonl")):  # of a job that failed before its first row
            write_whole(path, [msgspec.json.format(msgspec.json.encode(wanted), indent=2), b"\n"])
            return
    try:
        there = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BadInput(f"{path} is damaged: {error}. Fix: remove {folder}, or give another output=") from error
    names = [name for name in {**there, **wanted} if there.get(name) != wanted.get(name)]
    if names:
        changed = ", ".join(f"{name} ({there.get(name)} there, {wanted.get(name)} now)" for name in names)
        raise BadInput(f"output: {folder} holds another job, which differs in {changed}. Fix: another output=")


def fingerprint(model: Path) -> str:
    """Of a checkpoint's weights: the size of each file, and its first and last megabyte. Training changes them all."""
    digest = hashlib.blake2b(digest_size=16)
    piece = 1 << 20
    for path in sorted(model.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{path.name} {size} ".encode())
            digest.update(file.read(piece))
            file.seek(max(0, size - piece))
            digest.update(file.read(piece))
    return digest.hexdigest()


def sha256(path: Path) -> str:
    """Of a file, or of all files of a folder in the order of their names."""
    digest = hashlib.sha256()
    for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if each.is_file():
            with each.open("rb") as file:
                while piece := file.read(1 << 22):
                    digest.update(piece)
    return digest.hexdigest()


@contextmanager
def problems_bar(title: str, total: int, done: int, console: Console) -> Iterator[Callable[[], None]]:
    """A progress bar; without a terminal a line for each tenth. Gives a function to call for each problem."""
    live = console.is_terminal and not console.is_dumb_terminal
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("problems"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    counted = itertools.count(done + 1)
    with Progress(*columns, console=console, disable=not live) as progress:
        bar = progress.add_task(shown(title), total=total, completed=done)

        def advance() -> None:
            number = next(counted)
            progress.update(bar, completed=number)
            if not live and number * 10 // total > (number - 1) * 10 // total:
                console.print(shown(f"{title}: {number} of {total} problems"), highlight=False, soft_wrap=True)

        yield advance
