"""The stage that closes the loop: a step's groups -> the learner -> new weights on every replica -> leases released.

Invariants
- Steps are trained in order, each once; step k gives weight version k.
- The leases of a step come back after its weights are live and its metrics are written down, never before.
- When nothing is left to learn, the run succeeds: work upstream of this stage is cancelled, and `nothing_left` says
  after which step (`engine.stages.empty_batches`). The batch that shows it is not trained.
- The run ends in the same way when `enough` returns a reason after a step.
- The last step has a checkpoint, so that the run can be extended.
- A step's checkpoint is begun after its metrics and the prompts that were drawn are on the disk. The journal keeps all
  that follows the older of the two newest complete checkpoints.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from engine import metric_names as metric
from engine.fleet.canary import Difference
from engine.fleet.fleet import Fleet
from engine.learner.messages import Trained
from engine.learner.process import LearnerProcess
from engine.pipeline.leases import Leases
from engine.pipeline.pipeline import Inbox, Outbox, StageStats
from engine.recording.groups import Explain
from engine.recording.recording import Recording
from engine.run.resume import RunState
from engine.stages.empty_batches import EmptyBatches, NothingLeft
from engine.telemetry import metrics as measure
from engine.telemetry.stage_meter import StageMeter
from engine.telemetry.step_meter import StepMeter
from engine.telemetry.timeline import Timeline
from engine.types import Batch, Floats, Group, LearnerNumbers, PublishedWeights
from engine.user_parts import WrongPart, no_exit, place_of


@dataclass(kw_only=True)
class TrainStage:
    """The stage: the list of a step's groups -> the step's number. Raises NothingToTrain.

    make_batch: makes a step's batch from its groups. on_trained: what the recipe does with a step's metrics once its
    weights are live (evaluate, write down, show); nothing of a later step begins until it returns. stats: the
    pipeline's. replicas_rest: whether the replicas rest while the learner trains (`Fleet.rest`); nothing may be in
    flight then, which takes staleness 0. state: if given, the learner's state is saved there every `checkpoint_every`
    steps. train_s: seconds of training so far, without those of `on_trained`. full_reward: the reward of a trajectory
    that has solved its prompt. enough: asked before the first step and after each; returns a reason to end the run
    there. published: told of new weights before the replicas load them. host: returns what the node's own process
    measured since the last call (`engine.telemetry.host_meter`). recording: gets a step's groups, and the learner's
    numbers for some of their tokens. explain: explains the selection's choices, for the recording. nothing_left: why
    the run ended before its last step, if it did. made: told of a step's groups as they come. measure: returns further
    metrics of a step's groups.
    """

    learner: LearnerProcess
    fleet: Fleet
    leases: Leases
    make_batch: Callable[[int, Sequence[Group]], Batch]
    on_trained: Callable[[int, dict[str, float]], Awaitable[None]]
    stats: Callable[[], Sequence[StageStats]]
    timeline: Timeline
    state: RunState | None = None
    checkpoint_every: int = 1
    train_s: float = 0.0
    replicas_rest: bool = False
    full_reward: float = 1.0
    enough: Callable[[], str | None] = lambda: None
    host: Callable[[], dict[str, float]] = dict
    published: Callable[[PublishedWeights], None] = lambda weights: None
    recording: Recording | None = None
    explain: Explain | None = None
    nothing_left: NothingLeft | str | None = None
    made: Callable[[int, Sequence[Group]], None] = lambda step, groups: None
    measure: Callable[[Sequence[Group]], Mapping[str, float]] = lambda groups: {}

    def __post_init__(self) -> None:
        self._meter = StepMeter(self.timeline)
        self._stage_meter = StageMeter(self.stats)
        self._counted = self._counts()
        self._checkpoint_s = 0.0  # since the newest step

    async def __call__(self, inbox: Inbox, outbox: Outbox) -> None:
        """Waits for a step's groups, the learner and the replicas, each of which has its own deadline."""
        empty, step = EmptyBatches(self.full_reward), 0
        mark = self._begin()
        self._end_if_enough(inbox)  # a resumed run may have been killed when it had enough
        async for groups in inbox:
            following = self.leases.step_of(groups[0].lease) + 1
            self.made(following, groups)
            self.nothing_left = empty.saw(following, groups)
            if self.nothing_left is not None:
                inbox.finish()
                continue
            step = following
            metrics = await self._step(step, groups, mark)
            await self.on_trained(step, metrics)
            mark = self._begin()
            self._end_if_enough(inbox)  # before the leases come back, so that nothing more is begun
            for group in groups:
                self.leases.release(group.lease)
            if self.state is not None and step % self.checkpoint_every == 0:
                await self._checkpoint(step, self.state)
            await outbox.put(step)
        if self.state is not None and step % self.checkpoint_every:
            await self._checkpoint(step, self.state)

    def _end_if_enough(self, inbox: Inbox) -> None:
        with no_exit("function enough", self.enough):
            self.nothing_left = self.enough()
        if self.nothing_left is not None and not isinstance(self.nothing_left, str):
            raise WrongPart(
                f"enough returned {self.nothing_left!r:.100}. Fix: return the reason to end the run as text, or None"
            )
        if self.nothing_left:
            inbox.finish()

    def _begin(self) -> float:
        """Begins a step and returns the time. An evaluation before it adds nothing to its KV peak and its seconds."""
        self.fleet.kv_peak.clear()
        self._counted = self._counts()
        self._meter.begin()
        self._stage_meter.begin()
        self.host()
        return self.timeline.now()

    async def _checkpoint(self, step: int, state: RunState) -> None:
        """Checkpoints while the next step is rolled out. The journal keeps what follows the second newest one."""
        began = self.timeline.now()
        await asyncio.to_thread(state.run.sync)
        await asyncio.to_thread(state.journal.sync, state.journal.floor(step))
        await self.learner.checkpoint(state.checkpoints.of(step), step)
        if len(complete := state.checkpoints.steps()) > 1:
            state.journal.forget(complete[-2])
        ended = self.timeline.now()
        self._checkpoint_s = ended - began
        self.timeline.span("learner", f"checkpoint of step {step}", began, ended)

    async def _step(self, step: int, groups: Sequence[Group], mark: float) -> dict[str, float]:
        """Trains a step, brings its weights to the replicas, and returns its metrics. mark: when it began."""
        now = self.timeline.now
        metrics = {**measure.step(groups, self.fleet.version, self.full_reward), **self._further(groups)}
        ready = now()
        checkpoint_s, self._checkpoint_s = self._checkpoint_s, 0.0
        with self.timeline.idle_cause("staleness_gate"):
            trained, canary, numbers = await self._learn(step, groups)
            learnt = now()
            self.timeline.span("learner", f"step {step}", ready, learnt, 0, **trained.metrics)
            weights = PublishedWeights(trained.weights, step, canary, trained.canary_further)
            self.published(weights)
            difference = await self.fleet.update_weights(weights)
        live = now()
        if self.recording is not None:
            self.recording.trained(numbers)
        self.train_s += live - mark
        return metrics | {
            **{metric.member(metric.LEARNER, name): value for name, value in trained.metrics.items()},
            **_canary(difference),
            **self._pace(step, metrics, rollout_s=ready - mark, step_s=live - mark),
            metric.TIME_LEARN_S: learnt - ready,
            metric.TIME_SYNC_S: live - learnt,
            metric.TIME_CHECKPOINT_S: checkpoint_s,
            metric.TIME_TRAIN_TOTAL_S: self.train_s,
            **self._meter.read(),
            **self.host(),
            metric.REPLICAS_LIVE: len(self.fleet.live),
            **{name: count - self._counted[name] for name, count in self._counts().items()},
            **{metric.member(metric.KV_PEAK, index): share for index, share in self.fleet.kv_peak.items()},
            **self._stage_meter.read(),
        }

    def _further(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Returns what the recipe measures of a step's groups. Raises WrongPart for anything but a mapping."""
        with no_exit("function measure", self.measure):
            further = self.measure(groups)
        if not isinstance(further, Mapping):
            raise WrongPart(
                f"measure, {place_of(self.measure)}, returned {further!r:.100}. Fix: return {{name: number}}, or {{}}"
            )
        return further

    def _counts(self) -> dict[str, int]:
        """Returns the fleet's counts since the run began."""
        return {metric.KV_PREEMPTIONS: self.fleet.preemptions, metric.REPLICAS_DEATHS: self.fleet.deaths}

    async def _learn(self, step: int, groups: Sequence[Group]) -> tuple[Trained, Floats, Mapping[int, LearnerNumbers]]:
        """Trains a step; the replicas rest meanwhile if they share the learner's devices."""
        resting = self.fleet.rest() if self.replicas_rest else nullcontext()
        async with resting, asyncio.TaskGroup() as tasks:
            batch = self._made_batch(step, groups)
            rows = [] if self.recording is None else self.recording.begin(step, groups, batch, self.explain)
            learning = tasks.create_task(self._train(batch, step, rows), name="train")
            await asyncio.sleep(0)
            gc.collect()  # the learner has the cores now, and nothing waits for this process
        return learning.result()

    def _made_batch(self, step: int, groups: Sequence[Group]) -> Batch:
        with no_exit("function make_batch", self.make_batch):
            batch = self.make_batch(step, groups)
        if not isinstance(batch, Batch):
            raise WrongPart(
                f"make_batch, {place_of(self.make_batch)}, returned {batch!r:.100} in step {step}. "
                "Fix: return Batch.of(step, trajectories, advantages), as make_batch of algo.group.batch does"
            )
        return batch

    async def _train(
        self, batch: Batch, step: int, rows: Sequence[int]
    ) -> tuple[Trained, Floats, Mapping[int, LearnerNumbers]]:
        if rows:
            return await self.learner.train_noting(batch, step, rows)
        return *await self.learner.train(batch, version=step), {}

    def _pace(self, step: int, metrics: dict[str, float], rollout_s: float, step_s: float) -> dict[str, float]:
        """Returns the rates of a step. A step that was begun before the run was resumed has none, because the times of
        its rollouts are unknown.
        """
        resumed = self.state.journal.held_of(step - 1) if self.state is not None else 0
        if resumed:
            return {metric.ROLLOUT_TRAJECTORIES_RESUMED: resumed}
        return {
            metric.TOKENS_PER_S: metrics[metric.TOKENS_GENERATED] / step_s,
            metric.TOOLS_CALLS_PER_S: metrics[metric.TOOLS_CALLS] / step_s,
            metric.TIME_STEP_S: step_s,
            metric.TIME_ROLLOUT_S: rollout_s,
        }


def _canary(difference: Difference | None) -> dict[str, float]:
    if difference is None:
        return {}
    return {metric.CANARY_MEAN_ABS: difference.mean_abs, metric.CANARY_MAX_ABS: difference.max_abs}
