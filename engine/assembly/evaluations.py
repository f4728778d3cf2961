"""The evaluations of a training run: when each is due, and where its figures go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine import metric_names as metric
from engine.console.recorder import RunRecorder
from engine.fleet.fleet import Fleet
from engine.stages.evaluate import Evaluation, Evaluator


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledEvaluation:
    """An evaluation and the steps that it is due at: each multiple of `every`, 0 included, and the last one.

    evaluator: runs it on replicas of its own beside training; None: the training replicas run it between steps.
    """

    evaluation: Evaluation
    every: int
    evaluator: Evaluator | None = None

    def is_due(self, step: int, last: int) -> bool:
        return step % self.every == 0 or step == last


class EvaluationSchedule:
    """Runs the evaluations that are due. last: the run's last step. phase: is told what the run is doing."""

    def __init__(
        self,
        evaluations: Sequence[ScheduledEvaluation],
        fleet: Fleet,
        recorder: RunRecorder,
        *,
        last: int,
        phase: Callable[[str], None],
    ) -> None:
        self._evaluations, self._fleet, self._recorder, self._last, self._phase = (
            evaluations,
            fleet,
            recorder,
            last,
            phase,
        )

    @property
    def missed(self) -> int:
        """How many of the first evaluation's steps have no figures."""
        return sum(self._recorder.progress.missed(scheduled.every) for scheduled in self._evaluations[:1])

    async def begin(self) -> None:
        """Evaluates the weights with which the run begins or is resumed."""
        step = self._fleet.version
        if not self._recorder.progress.has_evaluated(step):  # one beside training may have been cut off
            await self._evaluate_and_record(step, self._due(step))

    async def step(self, step: int) -> dict[str, float]:
        """Evaluates the weights of a step. Returns the metrics, without those of evaluations beside training."""
        return await self._evaluate(step, self._due(step))

    async def end(self, *, early: bool) -> None:
        """Waits for the last figures. early: the run ends before its last step, so all are due now."""
        if early:
            step = self._fleet.version
            due = self._due(step)
            await self._evaluate_and_record(step, [each for each in self._evaluations if each not in due])
        for scheduled in self._evaluations:
            if scheduled.evaluator is not None:
                self._phase("waiting for the last evaluation")
                await scheduled.evaluator.drain()

    def _due(self, step: int) -> list[ScheduledEvaluation]:
        return [scheduled for scheduled in self._evaluations if scheduled.is_due(step, self._last)]

    async def _evaluate_and_record(self, step: int, due: Sequence[ScheduledEvaluation]) -> None:
        """Evaluates, and writes the figures in a row of their own."""
        if metrics := await self._evaluate(step, due):
            self._recorder.step(step, {**metrics, metric.TIME_TRAIN_TOTAL_S: self._recorder.progress.train_s})

    async def _evaluate(self, step: int, due: Sequence[ScheduledEvaluation]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for scheduled in due:
            if scheduled.evaluator is not None:
                assert self._fleet.weights is not None
                scheduled.evaluator.submit(step, self._fleet.weights)
                continue
            self._phase(f"evaluating on {len(scheduled.evaluation.prompts)} held-out problems")
            measured, trajectories = await scheduled.evaluation.run(step)
            self._recorder.evaluated(step, measured, trajectories)
            self._phase("training")
            metrics |= measured
        return metrics
