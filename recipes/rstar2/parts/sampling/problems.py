"""Samples and grades many problems and writes a row for each, for filters and evaluations.

Invariants
- A row is on the disk before its problem counts as done. A job that was killed goes on with the others and ends with
  the rows that it would have had: the seeds of a sample come from its problem's id.
- At most `in_flight` trajectories are under way (or the samples of one problem), whatever the number of problems.
- A sample that our infrastructure failed is tried again. A problem that cannot be sampled gets no row: it is never
  counted as wrong, and the same command tries it again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine.console.shown import shown
from engine.errors import first_error
from engine.ports import Reward
from engine.replica.port import ReplicaDied
from engine.stages.grading import graded
from engine.telemetry.timeline import Timeline
from engine.types import Boundary, Prompt, Trajectory
from recipes.rstar2.parts.sampling.rows import Row, RowFile

TRIES = 3  # tries of a sample that our infrastructure failed
GRADERS = 8  # trajectories graded at once; the others wait, which no deadline of a grade covers


class Samples(Protocol):
    """Makes samples, as the rollouts of `engine.rollout.rollout` and those of `remote.py` do."""

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
    """Adds a row for each of the prompts that have none. on_done: called after each of them.

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


@contextmanager
def problems_bar(title: str, total: int, done: int, console: Console) -> Iterator[Callable[[], None]]:
    """Shows a progress bar, or without a terminal a line for each tenth. Yields a function to call for each problem."""
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
