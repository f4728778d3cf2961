"""Evaluation on held-out prompts: between the steps on the training replicas, or concurrent on replicas of its own.

Invariants
- Every evaluation runs all prompts x samples with the same seeds, under one weight version; a token of another version
  is an error.
- A concurrent evaluation never waits for training, nor training for it: if more than `waiting` evaluations wait, the
  oldest of them is dropped.
- An evaluation that fails ends the task that owns the Evaluator.

Shape legend: P problems, K samples of each.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from engine import metric_names as metric
from engine.errors import first_error
from engine.fleet.fleet import Fleet
from engine.ports import GroupReward, Reward
from engine.rollout.rollout import Tally
from engine.rollout.source import RolloutSource
from engine.stages.grading import GRADE_DEADLINE_S, graded, graded_together
from engine.telemetry import metrics as measure
from engine.telemetry.failures import failures, summed_up
from engine.telemetry.timeline import Timeline
from engine.types import Prompt, PublishedWeights, Trajectory
from engine.user_parts import WrongPart, place_of
from sandbox.require import at_least, require


class NothingGraded(RuntimeError):
    """An evaluation has no result. The message says what failed."""


class Estimate(Protocol):
    """A mean and its interval (`algo.eval_stats.Interval`)."""

    @property
    def mean(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


class Evaluation:
    """What is evaluated, and how.

    estimate: estimates the mean of scores in [0, 1], [P, K], such as `algo.eval_stats.avg_at_k`. graders: how many
    trajectories are graded at once, or problems by a GroupReward. grade_deadline_s: the seconds of one grade, without
    the wait for a grader.

    Budgets and temperature are those of the rollouts: `rollouts.with_config(RolloutConfig(temperature=0.6, ...))` gives
    an evaluation its own. (Only trained trajectories need temperature 1.)
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        rollouts: RolloutSource,
        reward: Reward | GroupReward,
        estimate: Callable[[NDArray[np.float64]], Estimate],
        timeline: Timeline,
        graders: int = 8,
        grade_deadline_s: float = GRADE_DEADLINE_S,
    ) -> None:
        if min(len(prompts), samples, graders) < 1:
            given = f"{len(prompts)}, {samples} and {graders}"
            raise ValueError(f"prompts, samples and graders must be at least 1, got {given}")
        self.prompts, self.samples = list(prompts), samples
        self._rollouts, self._reward, self._estimate = rollouts, reward, estimate
        self._timeline = timeline
        self._grade_deadline_s = grade_deadline_s
        self._grading = asyncio.Semaphore(graders)

    async def run(self, version: int | None = None) -> tuple[dict[str, float], list[Trajectory]]:
        """Returns metrics, and the P x K trajectories in the order of the prompts.

        version: the weights that the replicas must serve meanwhile; None if they have the checkpoint's, without a
        learner. A problem does not count if our infrastructure failed one of its samples. Raises NothingGraded if no
        problem counts, and RuntimeError for a token of another version.
        """
        started = self._timeline.now()
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._solve(number, prompt, sample), name=f"evaluate-{prompt.id}-{sample}")
                for number, prompt in enumerate(self.prompts)
                for sample in range(self.samples)
            ]
        trajectories = [task.result() for task in running]
        if isinstance(self._reward, GroupReward):
            trajectories = await self._graded_together(trajectories, self._reward)
        for member in trajectories:
            if version is not None and (others := set(member.sampled_versions.tolist()) - {version}):
                raise RuntimeError(f"evaluation of version {version}: {member.prompt.id} has tokens of {others}")
        metrics = measure.evaluation(trajectories) | self._accuracy(trajectories)
        return metrics | {metric.TIME_EVAL_S: self._timeline.now() - started}, trajectories

    async def _solve(self, number: int, prompt: Prompt, sample: int) -> Trajectory:
        """Returns one sample of a problem, graded unless the samples are graded together."""
        in_flight = self._timeline.in_flight
        with in_flight.rollout(prompt.id, sample=sample, lease=-1) as watched:
            trajectory = await self._rollouts.run(prompt, sample, -1 - number, tally=Tally(watched=watched))
            trajectory = trajectory.without_routes()  # nothing of it is trained
            if not isinstance(self._reward, GroupReward):
                watched.moves("grading")
                async with self._grading:
                    trajectory = await graded(trajectory, self._reward, self._timeline, self._grade_deadline_s)
            in_flight.ends(watched, trajectory)
        return trajectory

    async def _graded_together(self, trajectories: Sequence[Trajectory], reward: GroupReward) -> list[Trajectory]:
        """Grades the samples of each problem together."""

        async def grade(row: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
            async with self._grading:
                return await graded_together(row, reward, self._timeline, self._grade_deadline_s)

        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(grade(row), name=f"grade-{row[0].prompt.id}") for row in self._rows(trajectories)
            ]
        return [member for task in running for member in task.result()]

    def _rows(self, trajectories: Sequence[Trajectory]) -> list[Sequence[Trajectory]]:
        """Returns the samples of each problem."""
        return [trajectories[first : first + self.samples] for first in range(0, len(trajectories), self.samples)]

    def _accuracy(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Returns avg@K over the problems that were graded throughout. Raises NothingGraded."""
        graded = [row for row in self._rows(trajectories) if all(member.error is None for member in row)]
        if not graded:
            cause = summed_up(failures(trajectories), len(trajectories))
            raise NothingGraded(f"evaluation: no problem was graded throughout: {cause}")
        scores_PK = np.asarray([[(member.reward or 0.0) > 0 for member in row] for row in graded], np.float64)
        accuracy = self._estimate(scores_PK)
        if not all(hasattr(accuracy, name) for name in ("mean", "low", "high")):
            raise WrongPart(
                f"the estimate {place_of(self._estimate)} returned {accuracy!r:.100}. Fix: return an object with mean, "
                "low and high, as avg_at_k of algo.eval_stats does"
            )
        bounds = {metric.EVAL_ACCURACY_LOW: accuracy.low, metric.EVAL_ACCURACY_HIGH: accuracy.high}
        sources = [row[0].prompt.source for row in graded]
        means = measure.by_source(metric.EVAL_ACCURACY, zip(sources, scores_PK.mean(axis=1), strict=True))
        return {metric.EVAL_ACCURACY: accuracy.mean, **bounds, **means, metric.EVAL_K: self.samples}


class Evaluator:
    """Evaluates while training goes on: `async with Evaluator(...)` runs the task, and `submit` gives it weights.

    evaluation: its rollouts use `fleet`, and nobody else does. evaluated: called with (step, metrics, trajectories),
    steps ascending. folder: a folder on the file system of the published weights, which stay linked there for as long
    as a replica may need them.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        fleet: Fleet,
        evaluated: Callable[[int, dict[str, float], list[Trajectory]], None],
        folder: Path,
        waiting: int = 2,
    ) -> None:
        require("waiting", waiting, at_least(1))
        self._evaluation, self._fleet, self._evaluated = evaluation, fleet, evaluated
        self._folder, self._bound = folder, waiting
        self._waiting: deque[tuple[int, PublishedWeights]] = deque()
        self._pinned: deque[Path] = deque()  # its newest stays for a replica that is replaced
        self._busy = False
        self._change = asyncio.Event()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._stack.callback(tasks.create_task(self._work(), name="evaluator").cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stack.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures
        finally:
            for path in (*self._pinned, *(Path(weights.path) for _, weights in self._waiting)):
                path.unlink()

    def submit(self, step: int, weights: PublishedWeights) -> None:
        """Submits weights without waiting. Their file may be deleted as soon as this returns."""
        pinned = self._folder / f"evaluate-{step}-{Path(weights.path).name}"
        os.link(weights.path, pinned)
        self._waiting.append((step, replace(weights, path=str(pinned))))
        if len(self._waiting) > self._bound:
            _, oldest = self._waiting.popleft()
            Path(oldest.path).unlink()
        self._change.set()

    async def drain(self) -> None:
        """Waits until all submitted weights are evaluated."""
        while self._waiting or self._busy:
            await self._changed()

    async def _changed(self) -> None:
        self._change.clear()
        await self._change.wait()

    async def _work(self) -> None:
        """Evaluates submitted weights; `submit` unblocks it. Each part of an evaluation has its own deadlines."""
        while True:
            while not self._waiting:
                await self._changed()
            self._busy = True
            step, weights = self._waiting.popleft()
            self._pinned.append(Path(weights.path))
            await self._fleet.update_weights(weights)
            if len(self._pinned) > 1:
                self._pinned.popleft().unlink()
            self._evaluated(step, *await self._evaluation.run(weights.version))
            self._busy = False
            self._change.set()
