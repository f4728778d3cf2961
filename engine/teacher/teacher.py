"""A teacher at work: it scores each turn as soon as that is whole, while other trajectories are still sampled.

    async with teacher_of(config, student=..., chat=job.chat, max_tokens=230) as teacher:      # engine.teacher.opened
        job.group(teacher.scores(rollouts), reward, select)
        job.train(make_batch, measure=teacher.measured)

Invariants
- Every turn of a trajectory that is trained has scores, also those that a journal held, and those of an agent's
  segments. What was not scored while it was sampled is scored at the trajectory's end.
- A turn is scored by the same tokens in every case, so that a resumed run gets what the first one got, if the teacher
  computes the same (on the CPU it does).
- A teacher that gives no scores within its deadline ends the run with TeacherLost; there is never a made-up score.
- A trajectory in which the student sampled an id that only pads, which a teacher may have no row for, has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine import clock
from engine import metric_names as metric
from engine.errors import first_error
from engine.replica.port import ReplicaDied
from engine.rollout.rollout import Tally
from engine.rollout.source import RolloutSource
from engine.run.journal import Log
from engine.teacher.meter import OverlapMeter
from engine.types import (
    Boundary,
    Group,
    Ids,
    Prompt,
    RolloutError,
    Segment,
    StopReason,
    TokenScores,
    Trajectory,
)


class TeacherLost(RuntimeError):
    """The teacher gave no scores, and the run cannot continue without them."""


class Scores(Protocol):
    """What scores tokens: `engine.fleet.fleet.Fleet`, `engine.teacher.endpoint.Endpoint`.

    class Indifferent:  # thinks every token of a vocabulary of 512 equally likely
        async def score(self, token_ids, start, top=0):
            return TokenScores(logprobs_T=np.full(len(token_ids) - start, -math.log(512), np.float32))
    """

    async def score(self, token_ids: Sequence[int], start: int, top: int = 0) -> TokenScores:
        """Returns the scores of the tokens from `start` on. Raises ReplicaDied if it cannot, and ValueError for tokens
        that it does not take.
        """
        ...


class Teacher:
    """`async with teacher_of(...) as teacher`. name: for messages. tokens: ids of the student lie below it, and those
    from `known` on only pad. trouble: returns why there are no scores at present; "" if nothing is known.
    """

    def __init__(
        self,
        scorer: Scores,
        *,
        name: str,
        top: int,
        deadline_s: float,
        tokens: int,
        known: int,
        trouble: Callable[[], str] = lambda: "",
    ) -> None:
        self.name, self.top, self.known = name, top, known
        self.meter = OverlapMeter()
        self._scorer, self._deadline_s, self._tokens, self._trouble = scorer, deadline_s, tokens, trouble

    def scores(self, rollouts: RolloutSource) -> ScoredRollouts:
        """Returns the rollouts with the teacher's scores in their trajectories. For `job.group`."""
        return ScoredRollouts(rollouts, self)

    async def score(self, token_ids: Sequence[int], start: int) -> TokenScores:
        """Returns the teacher's scores of the tokens from `start` on. Raises TeacherLost."""
        self.meter.change(clock.now(), scoring=1)
        try:
            async with asyncio.timeout(self._deadline_s) as budget:
                scores = await self._scorer.score(token_ids, start, self.top)
        except TimeoutError as error:
            if not budget.expired():
                raise
            late = f"teacher {self.name}: no scores within {self._deadline_s:g} s"
            if trouble := self._trouble():
                fix = "Fix: start the server again, then rerun the same command; the run resumes"
                raise TeacherLost(f"{late}: {trouble}. {fix}") from error
            fix = "Fix: a faster teacher, fewer rollouts at once, or a larger teacher_deadline_s"
            raise TeacherLost(f"{late}. {fix}") from error
        except (ReplicaDied, ValueError) as error:
            raise TeacherLost(f"teacher {self.name}: {error}") from error
        finally:
            self.meter.change(clock.now(), scoring=-1)
        if not np.isfinite(scores.logprobs_T).all():
            at = int(np.flatnonzero(~np.isfinite(scores.logprobs_T))[0])
            value = scores.logprobs_T[at]
            raise TeacherLost(
                f"teacher {self.name}: the log-probability of token {start + at} of {len(token_ids)} is {value}"
            )
        if len(scores.top_ids) and scores.top_ids.max() >= self._tokens:
            beyond = f"id {scores.top_ids.max()} among its likeliest tokens"
            ends = f"the student's ids end at {self._tokens - 1}"
            raise TeacherLost(
                f"teacher {self.name}: {beyond}, which only pads, and {ends}. Fix: a smaller top_k, or none"
            )
        return scores

    def measured(self, groups: Sequence[Group], *, clip: float | None = None) -> dict[str, float]:
        """Returns the metrics of a step's scored trajectories; nothing if none was scored. For `job.train`.

        clip: beyond so many nats a token counts as clipped; None: nothing is clipped, so no share of it is reported.
        """
        trajectories = [member for group in groups for member in group.trajectories if member.error is None]
        gaps = [_gaps(part, part.teacher) for it in trajectories for part in it.parts if part.teacher is not None]
        gaps_M = np.concatenate(gaps) if gaps else np.zeros(0)
        busy_s, overlap_s = self.meter.read(clock.now())
        if not len(gaps_M):
            return {}
        return {
            metric.DISTILL_KL: float(gaps_M.mean()),
            **({} if clip is None else {metric.DISTILL_CLIPPED: float((np.abs(gaps_M) > clip).mean())}),
            metric.DISTILL_TOKENS: len(gaps_M),
            # A step whose scores all came from rollout nodes or from the journal has no times of this teacher.
            **({metric.DISTILL_TEACHER_S: busy_s, metric.DISTILL_OVERLAP: overlap_s / busy_s} if busy_s else {}),
        }


def _gaps(part: Trajectory | Segment, scores: TokenScores) -> NDArray[np.float64]:
    """Returns sampler - teacher of the sampled tokens, float64 [M]: k1 estimates of KL(student || teacher)."""
    return part.logprobs_T[part.sampled_T].astype(np.float64) - scores.logprobs_T[part.sampled_T]


@dataclass(frozen=True, slots=True)
class ScoredRollouts:
    """Rollouts whose turns a teacher scores."""

    rollouts: RolloutSource
    teacher: Teacher

    @property
    def config(self) -> Any:
        """The budget of the rollouts, if they have one."""
        return getattr(self.rollouts, "config", None)

    @property
    def tokens_sampled(self) -> int:
        return self.rollouts.tokens_sampled

    async def run(
        self, prompt: Prompt, sample: int, group: int, *, tally: Tally | None = None, log: Log | None = None
    ) -> Trajectory:
        """Returns a trajectory with scores; one that failed has none. Raises TeacherLost."""
        tally, meter = tally or Tally(), self.teacher.meter
        asked: dict[bytes, asyncio.Task[TokenScores]] = {}  # by the ids up to the turn's end
        try:
            async with asyncio.TaskGroup() as scoring:

                def ask(ids: Ids, start: int) -> asyncio.Task[TokenScores]:
                    key = ids.tobytes()
                    if key not in asked:
                        name = f"teacher-{prompt.id}-{sample}-{len(ids)}"
                        asked[key] = scoring.create_task(self.teacher.score(ids.tolist(), start), name=name)
                    return asked[key]

                def turn_ended(ids: Sequence[int], start: int) -> None:
                    if max(ids) < self.teacher.known:
                        ask(np.array(ids, np.int32), start)

                tally.turn_ended = turn_ended
                meter.change(clock.now(), rolling=1)
                try:
                    trajectory = await self.rollouts.run(prompt, sample, group, tally=tally, log=log)
                finally:
                    meter.change(clock.now(), rolling=-1)
                trajectory = self._checked(trajectory)
                if trajectory.error is None:
                    wanted = [
                        [(turn.start, ask(part.token_ids_T[: turn.end], turn.start)) for turn in part.turns]
                        for part in trajectory.parts
                    ]
                    main, *others = [
                        await self._joined(part, turns) for part, turns in zip(trajectory.parts, wanted, strict=True)
                    ]
                    segments = [
                        replace(segment, teacher=scores)
                        for segment, scores in zip(trajectory.segments, others, strict=True)
                    ]
                    trajectory = replace(trajectory, teacher=main, segments=tuple(segments))
                for task in asked.values():
                    task.cancel()  # those of a trajectory that failed or began again
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures
        return trajectory

    def _checked(self, trajectory: Trajectory) -> Trajectory:
        """Returns it as failed if it has an id that only pads."""
        highest = max(int(part.token_ids_T.max(initial=0)) for part in trajectory.parts)
        if trajectory.error is not None or highest < self.teacher.known:
            return trajectory
        message = f"the student sampled id {highest}, which only pads: its tokens end at {self.teacher.known - 1}"
        error = RolloutError(boundary=Boundary.REPLICA, message=message)
        return replace(trajectory, stop=StopReason.ERROR, error=error)

    async def _joined(
        self, part: Trajectory | Segment, turns: Sequence[tuple[int, asyncio.Task[TokenScores]]]
    ) -> TokenScores:
        scores = TokenScores.none(len(part.token_ids_T), self.teacher.top)
        for start, task in turns:
            scores = scores.placed(await task, start)
        return scores
