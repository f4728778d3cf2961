"""What a recipe is opened with: learner, replicas, sandbox and journal, started at once and restored where a run was.

    async with training(config, run) as job:
        rollouts = job.rollouts([PythonTool(job.sandbox)])
        reward = MathReward(runner=job.sandbox)
        evaluation = await job.evaluation(held_out, reward, rollouts=rollouts, estimate=avg_at_k, every=8)
        return await job.run(
            [
                job.admit(prompts),
                job.group(rollouts, reward, select_and_score(RoC(keep=8), seed=config.seed)),
                job.batch(),
                job.train(make_batch, evaluations=[evaluation]),
            ]
        )

Invariants
- The recipe is the list of stages. The parts are plain attributes that it may use or replace; each method is a few
  lines over a public function or class, which a recipe that outgrows the method calls itself.
- A run that was interrupted goes on by being opened again: leases, journal, learner state and metrics are restored
  here, and the recipe does nothing for it.
- Replicas and learner agree on the first weights before anything is sampled.
"""

from __future__ import annotations

from engine.process import streams
from sandbox.http.listener import Address
from sandbox.printable import printable

streams.prepare_descriptors()  # before other imports open files

import asyncio
import dataclasses
import gc
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from engine.replica.config import ReplicaConfig, prepare_environment

prepare_environment()
gc.set_threshold(50_000, 20, 1_000_000)  # imports make objects by the million; training collects the oldest once a step

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console

from engine.assembly import wiring
from engine.assembly.devices import DevicePlan
from engine.atomic_files import CannotWrite, write_whole
from engine.balancing.balancer import Balancer
from engine.balancing.kv_aware import KvAware
from engine.console.display import Display
from engine.console.recorder import RunRecorder
from engine.console.report import model_card, print_report
from engine.errors import BadInput, first_error
from engine.fleet.canary import CanaryFailed, tolerance_of
from engine.fleet.config import PAUSED_SHARE, FleetConfig
from engine.fleet.fleet import Fleet
from engine.gateway.agent import Agent, AgentRollouts
from engine.gateway.gateway import Gateway, GatewayConfig
from engine.gateway.http.server import ServerConfig, serve
from engine.gateway.program import PROGRAMS, Command
from engine.learner.messages import Configure
from engine.learner.process import LearnerDied, LearnerProcess, LearnerProcessConfig
from engine.pipeline.leases import Leases
from engine.pipeline.pipeline import Inbox, Outbox, Pipeline, Stage, StageStats
from engine.pipeline.whereabouts import GroupVanished
from engine.ports import GroupReward, Reward, StatefulTool, Tool
from engine.recipe import Run
from engine.recording.policy import RecordConfig
from engine.recording.recording import Recording
from engine.replica.port import KvSample, ReplicaDied
from engine.replica.replica import Replica
from engine.rollout.chat_template import ChatConfig, ChatTemplate, TemplateError
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.rollout.source import RolloutSource
from engine.run.checkpoints import Unresumable
from engine.run.resume import RunState
from engine.run.run_folder import RunFolder, shortened, versions
from engine.run.step_history import StepHistory
from engine.run.workspace import workspace
from engine.stages.admit import AdmittedPrompt, admit
from engine.stages.batch import batch_groups
from engine.stages.empty_batches import NothingLeft, NothingToTrain, check_graded
from engine.stages.evaluate import Estimate, Evaluation, Evaluator, NothingGraded
from engine.stages.group import Attempt, GroupConfig, MakesGroups, groups
from engine.stages.train import TrainStage
from engine.stages.write_rollouts import write_rollouts
from engine.telemetry.host_meter import HostMeter
from engine.telemetry.noted_warnings import noted_warnings
from engine.telemetry.sinks import MetricSink, SinkUnavailable
from engine.telemetry.timeline import Timeline
from engine.telemetry.watchdog import NoProgress, shows_on_signal, watch
from engine.types import Batch, Group, Prompt, PublishedWeights
from engine.user_parts import WrongPart
from sandbox import Sandbox, SandboxConfig, SandboxUnavailable

# Whose log-probabilities replicas and learner must agree on after each weight update; any text does.
CANARY = (
    "What is 12 times 34?",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel?",
    "Write a program that prints the first ten primes.",
    "Tom has 81 coins, spends half of them and finds 38. How many has he now?",
)
BLOCK = 32  # tokens beyond a trajectory's budget that a replica has room for


class BudgetTooSmall(ValueError):
    """No prompt leaves room for an answer."""


# What ends a run with one line for the user. All else is a bug, perhaps in a stage or a reward of the recipe's, of
# which `engine.console.failure` shows the user's own lines.
EXPECTED = (
    BudgetTooSmall,
    CanaryFailed,
    CannotWrite,
    GroupVanished,
    LearnerDied,
    NothingGraded,
    NothingToTrain,
    ReplicaDied,
    SandboxUnavailable,
    SinkUnavailable,
    NoProgress,
    TemplateError,
    Unresumable,
    WrongPart,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """The machine of a run. What is trained on, with which tools and for what reward is in the recipe's stages."""

    checkpoint: Path
    """Hugging Face folder to start from."""
    steps: int
    """Optimizer batches. A run that has ended goes on when it is opened with more."""
    prompts_per_step: int
    """Groups per step (B)."""
    group: GroupConfig
    rollout: RolloutConfig
    learner: Any
    """A dataclass that the learner's module takes, such as `algo.learner.config.LearnerConfig`."""
    learner_state: Path | None = None
    """A learner's checkpoint of another run (its checkpoints/step-000012) to begin with: weights, optimizer, batches
    counted so far and random numbers. None: the checkpoint's weights and a new optimizer.
    """
    learner_module: str = "algo.learner"
    """What each rank of the learner runs; they meet by `algo.learner.hosts.meet`."""
    replica: ReplicaConfig | None = None
    """None: of the checkpoint, with room for a trajectory of the rollout's budget."""
    devices: DevicePlan = field(default_factory=DevicePlan)
    """GPUs, ranks and replicas; by default everything runs on the CPU."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    sandbox: SandboxConfig | None = None
    """None: no sandbox."""
    seed: int = 0
    """Of sampling and of the learner. The recipe gives it to its prompts and to its selection too."""
    max_staleness: int = 0
    """Weight versions that a trained token may be old (S); 0 is strictly on-policy."""
    checkpoint_every: int = 4
    """Steps between checkpoints of the learner; the journal has what follows."""
    step_deadline_s: float = 600.0
    """Seconds in which the learner must have trained a step, or saved; half as many more without any progress end the
    run."""
    start_deadline_s: float | None = None
    """Seconds in which each replica and the learner must be up. None: their own (`ReplicaConfig`,
    `LearnerProcessConfig`); a large model on a slow disk needs more."""
    canary_tolerance: float | Literal["auto"] | None = "auto"
    """How far a replica's log-probabilities of the canary may be from the learner's in the mean; a single token may be
    ten times as far. "auto": by dtype and number of layers (`engine.fleet.canary`). None: measured, not judged."""
    full_reward: float = 1.0
    """Of a trajectory that has solved its prompt: where all have, nothing is left to learn."""
    title: str = ""
    """Of the plot."""
    record: RecordConfig = field(default_factory=RecordConfig)
    """What is written down for people who look at the run."""

    def __post_init__(self) -> None:
        kinds = {"checkpoint": Path, "group": GroupConfig, "rollout": RolloutConfig, "devices": DevicePlan}
        kinds |= {"chat": ChatConfig, "record": RecordConfig, "steps": int, "prompts_per_step": int}
        for name, kind in kinds.items():
            wanted = isinstance(getattr(self, name), kind)
            wiring.require(
                getattr(self, name),
                wanted,
                f"{name} must be of the type {kind.__name__}",
                f"{name}={kind.__name__}(...)",
            )
        for name, least in (("steps", 1), ("checkpoint_every", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("step_deadline_s", "start_deadline_s", "canary_tolerance"):
            if (value := getattr(self, name)) not in (None, "auto") and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.max_staleness > self.steps:
            raise ValueError(f"max_staleness must be at most steps={self.steps}, got {self.max_staleness}")
        if not (self.checkpoint / "config.json").is_file():
            raise ValueError(
                f"checkpoint: no config.json in {str(self.checkpoint)!r}, and nothing is downloaded from a hub. "
                "Fix: give a Hugging Face folder"
            )
        if self.learner_state is not None and not self.learner_state.is_dir():
            raise ValueError(f"learner_state must be a folder, got {str(self.learner_state)!r}")
        if self.devices.adapters and not getattr(self.learner, "lora_rank", 0):
            raise ValueError("adapters must be False where lora_rank is 0: all weights are trained, got True")
        Leases(self.prompts_per_step, self.max_staleness)
        if self.replicas_config.quantization is not None:
            self._check_quantized()

    def _check_quantized(self) -> None:
        """Quantised replicas sample from another model than the one that learns: its loss has to correct for that, and
        how far apart they are was not measured yet.
        """
        what = f"replica.quantization={self.replicas_config.quantization!r}"
        loss = getattr(self.learner, "loss", {})
        if "correction" in loss and not (loss.get("proximal") and loss["correction"]):
            raise ValueError(
                f"{what} needs a loss that corrects for the sampler. Fix: "
                "LearnerConfig(loss=PpoClip(proximal=True, correction=Correction(level='token', upper=2.0)))"
            )
        if self.canary_tolerance == "auto":
            raise ValueError(f"{what} needs canary_tolerance, got 'auto'. Fix: one, such as 1.0; none is known yet")

    @property
    def replicas_config(self) -> ReplicaConfig:
        room = self.rollout.max_tokens + BLOCK
        config = self.replica or ReplicaConfig(checkpoint=str(self.checkpoint), max_model_len=room)
        if self.devices.adapters:
            config = dataclasses.replace(
                config,
                weight_transfer="adapter",
                lora_rank=self.learner.lora_rank,
                lora_targets=self.learner.lora_targets,
                adapters=1 + self.max_staleness,
            )
        if self.start_deadline_s is not None:
            config = dataclasses.replace(config, start_deadline_s=self.start_deadline_s)
        return self.devices.replica(config)

    @property
    def canary_bound(self) -> float | None:
        """The tolerance of the canary's mean difference; None: not judged. Where one side rounds to bfloat16 both do,
        as far as this goes.
        """
        if self.canary_tolerance != "auto":
            return self.canary_tolerance
        sides = (self.replicas_config, self.learner)
        dtypes = [getattr(side, name, "float32") for side in sides for name in ("dtype", "weights_dtype")]
        return tolerance_of(self.checkpoint, "bfloat16" if "bfloat16" in dtypes else "float32")


EVERY_ADDRESS = ("", "0.0.0.0", "::")


@dataclass(kw_only=True)
class ScheduledEvaluation:
    """An evaluation and the steps that it is due at: each multiple of `every`, 0 included, and the last one.

    evaluator: runs it on replicas of its own beside training; None: the training replicas run it between steps.
    """

    evaluation: Evaluation
    every: int
    evaluator: Evaluator | None = None

    def is_due(self, step: int, last: int) -> bool:
        return step % self.every == 0 or step == last


class Role(Protocol):
    """What differs where other machines take part: `Alone` runs on one machine, `engine.programs.roles.Leads` leads
    others.
    """

    def learner(self, config: LearnerProcessConfig) -> LearnerProcessConfig:
        """How the learner is started."""

    def beside(self, job: Training) -> AbstractAsyncContextManager[object]:
        """What runs from when the parts are up until they end."""

    def groups(self, here: MakesGroups) -> Attempt | None:
        """Who makes the groups that the stages ask for. None: `here` does, on the replicas of this machine."""

    def published(self, weights: PublishedWeights) -> None:
        """The learner has new weights."""

    def trained(self) -> Mapping[str, float]:
        """The weights of a step are live on the replicas here. Returns further metrics of the step."""

    def tokens(self) -> int:
        """Tokens sampled elsewhere so far."""

    async def ended(self) -> None:
        """The run has written its summary."""


# What a machine without a learner does with the parts in place of the stages. Returns what `train` returns.
Work = Callable[["Training"], Coroutine[Any, Any, dict[str, Any]]]


class Alone:
    """The run is this machine's alone."""

    def learner(self, config: LearnerProcessConfig) -> LearnerProcessConfig:
        return config

    def beside(self, job: Training) -> AbstractAsyncContextManager[object]:
        return nullcontext()

    def groups(self, here: MakesGroups) -> Attempt | None:
        return None

    def published(self, weights: PublishedWeights) -> None:
        pass

    def trained(self) -> Mapping[str, float]:
        return {}

    def tokens(self) -> int:
        return 0

    async def ended(self) -> None:
        pass


class Training:
    """The parts of a run, as plain attributes. Made by `training`."""

    learner: LearnerProcess
    fleet: Fleet
    chat: ChatTemplate
    workspace: Path
    """Private and in shared memory: published weights, local sockets."""

    def __init__(
        self,
        config: TrainingConfig,
        run: RunFolder,
        *,
        make_balancer: Callable[[], Balancer] | None,
        sinks: Sequence[MetricSink],
        console: Console,
        role: Role | None = None,
        work: Work | None = None,
    ) -> None:
        self.config, self.run_folder, self.console = config, run, console
        self.role: Role = role or Alone()
        self.work = work
        self.makes: MakesGroups | None = None  # the recipe's rollouts and reward, once its stages are listed
        self.state = RunState.open(run, config.prompts_per_step)
        self.journal = self.state.journal
        self.timeline = Timeline()
        self.leases = Leases(config.prompts_per_step, config.max_staleness, self.state.step)
        self.recorder = RunRecorder(run, self.state, self.timeline, title=config.title, sinks=sinks)
        self.steps = StepHistory(
            lambda: self.recorder.progress.steps,
            prompts_per_step=config.prompts_per_step,
            max_staleness=config.max_staleness,
            path=run.path / "curriculum.jsonl",
        )
        self.recording: Recording | None = None
        self.host = HostMeter(say=self._loop_stands, end=lambda: os._exit(1), silence_s=1.5 * config.step_deadline_s)
        self.stats: Callable[[], list[StageStats]] = list  # of the pipeline, once there is one
        self.nothing_left: NothingLeft | str | None = None  # set when the run ends before its last step
        # A request that moves goes on under another seed, so that by default nothing moves.
        self._make_balancer = make_balancer or partial(KvAware, config.rollout.max_tokens, moves=0)
        self._sandbox: Sandbox | None = None
        self._prompts: Iterator[Prompt] = iter(())
        self._rollouts: list[RolloutSource] = []
        self._gateways: dict[tuple[str, str], tuple[Gateway, str]] = {}  # by host and token, with their addresses
        self._evaluations: Sequence[ScheduledEvaluation] = ()
        self._train: TrainStage | None = None
        self._display: Display | None = None
        self._has_run = False
        self._until_first_step: dict[str, float] = {}  # seconds since the process began, at the end of each part

    @property
    def sandbox(self) -> Sandbox:
        """Raises ValueError where the configuration has none."""
        if self._sandbox is None:
            raise ValueError("TrainingConfig.sandbox must be set for a sandbox, got None")
        return self._sandbox

    def rollouts(self, tools: Sequence[Tool | StatefulTool | Callable[..., Any]]) -> Rollouts:
        """Trajectories on the run's replicas, with these tools; `Rollouts.with_config` gives them another budget. A
        typed function is a tool too: the model is shown its name, docstring and parameters.
        """
        wiring.check_tools(tools)
        made = Rollouts(self.config.rollout, self.chat, self.fleet, tools, self.timeline, self.config.seed)
        self._rollouts.append(made)
        return made

    async def agents(
        self, agent: Agent, *, at_once: int | None = None, host: str = "127.0.0.1", token: str = ""
    ) -> AgentRollouts:
        """Trajectories that an agent of its own makes with the run's replicas, through a gateway on this machine.

        at_once: agents that run at once; None: 64 programs (`Command`), any number of coroutines. host: this machine's
        address for agents in containers or on other machines, which then need a token; it is the key of their endpoint.
        """
        if host in EVERY_ADDRESS:
            raise ValueError(f"host must be the address at which agents reach this machine, got {host!r}")
        model, seed = self.config.checkpoint.name, self.config.seed
        if (host, token) not in self._gateways:
            config = GatewayConfig(max_sessions=1 << 20)
            gateway = Gateway(self.fleet, self.chat, self.timeline, config, self.run_folder.note)
            server = serve(gateway, ServerConfig(model=model, address=Address(host=host, token=token)))
            self._gateways[host, token] = gateway, await self._stack.enter_async_context(server)
        gateway, address = self._gateways[host, token]
        made = AgentRollouts(
            agent,
            self.config.rollout,
            gateway,
            address=address,
            model=model,
            seed=seed,
            token=token,
            at_once=PROGRAMS if at_once is None and isinstance(agent, Command) else at_once,
        )
        self._rollouts.append(made)
        return made

    async def evaluation(
        self,
        prompts: Sequence[Prompt],
        reward: Reward | GroupReward,
        *,
        rollouts: Rollouts | AgentRollouts,
        estimate: Callable[[NDArray[np.float64]], Estimate],
        every: int,
        samples: int = 1,
        replicas: int = 0,
    ) -> ScheduledEvaluation:
        """An evaluation on held-out prompts, for `train`. replicas: of its own, beside training; 0: the training
        replicas run it between steps. Raises BudgetTooSmall when no prompt leaves room for an answer.
        """
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        wiring.check_held_out(prompts, self.note)
        wiring.check_reward(reward)
        wiring.check_rollouts(rollouts)
        self._check_budget(prompts, rollouts)
        deadline_s = self.config.group.grade_deadline_s
        if not replicas or self.work is not None:
            evaluation = Evaluation(
                prompts, samples, rollouts, reward, estimate, self.timeline, grade_deadline_s=deadline_s
            )
            return ScheduledEvaluation(evaluation=evaluation, every=every)
        if isinstance(rollouts, AgentRollouts):
            raise ValueError("replicas must be 0 for rollouts of agents, which the training replicas evaluate")
        timeline = Timeline()  # not written: its replicas have the same numbers as those that train
        fleet = await self._stack.enter_async_context(self._fleet(replicas, timeline, pinned=False))
        apart = rollouts.on(fleet, timeline)
        self._rollouts.append(apart)
        evaluation = Evaluation(prompts, samples, apart, reward, estimate, timeline, grade_deadline_s=deadline_s)
        evaluator = Evaluator(evaluation, fleet, self.recorder.background_evaluation, self.workspace)
        await self._stack.enter_async_context(evaluator)
        return ScheduledEvaluation(evaluation=evaluation, every=every, evaluator=evaluator)

    def admit(self, prompts: Iterator[Prompt]) -> Stage:
        """prompts: the stream from its start; what a resumed run has drawn of it is passed over."""
        wiring.check_stream(prompts)
        self._prompts = wiring.checked(self.journal.after(prompts), self.journal.position, self.note)
        waiting = partial(self.timeline.idle_cause, "lease")
        return Stage(name="admit", run=admit(self._prompts, self.leases, self.config.steps, self.journal, waiting))

    def group(self, rollouts: RolloutSource, reward: Reward | GroupReward, select: Callable[[Group], Group]) -> Stage:
        """A group of graded trajectories per prompt, and what is trained of it. The prompts of `admit` refill it."""
        wiring.check_rollouts(rollouts)
        wiring.check_reward(reward)
        wiring.check_select(select)
        if self.recording is not None:  # what the selection says of its choices is recorded
            self.recording.explain = getattr(select, "explain", None)
        self.makes = MakesGroups(rollouts=rollouts, reward=reward, config=self.config.group, timeline=self.timeline)
        elsewhere = self.role.groups(self.makes)
        refills = self._refills()
        run = groups(
            rollouts, reward, select, refills, self.config.group, self.timeline, self.journal, attempt=elsewhere
        )
        workers = self.config.prompts_per_step if elsewhere is None else self.leases.capacity
        return Stage(name="groups", run=run, workers=workers, takes=AdmittedPrompt)

    def _refills(self) -> Iterator[Prompt]:
        """The prompts of `admit`, which may be called later."""
        yield from self._prompts

    def batch(self) -> Stage:
        """The groups of a step, together."""
        return Stage(name="batch", run=batch_groups(self.leases), takes=Group, collects=True)

    def write_rollouts(self, *, every: int) -> Stage:
        """Writes the rollouts of each `every`th step to rollouts/, for people. After `batch`."""
        folder = self.run_folder.path / "rollouts"
        return Stage(name="write_rollouts", run=write_rollouts(folder, self.leases, every=every), takes=list)

    def train(
        self,
        make_batch: Callable[[int, Sequence[Group]], Batch],
        *,
        evaluations: Sequence[ScheduledEvaluation] = (),
        enough: Callable[[Sequence[Mapping[str, float]]], str | None] = lambda steps: None,
    ) -> Stage:
        """The learner, the new weights on all replicas, and the evaluations that are due under them.

        enough: called with the rows of all steps so far; a reason to end the run here, None to go on.
        """
        wiring.check_make_batch(make_batch)
        wiring.check_evaluations(evaluations, ScheduledEvaluation)
        wiring.check_enough(enough)
        if self.work is not None:
            return Stage(name="learn", run=_elsewhere)
        self._evaluations = evaluations
        self._train = TrainStage(
            learner=self.learner,
            fleet=self.fleet,
            leases=self.leases,
            make_batch=make_batch,
            on_trained=self._on_trained,
            stats=lambda: self.stats(),
            timeline=self.timeline,
            host=self.host.read,
            state=self.state,
            checkpoint_every=self.config.checkpoint_every,
            train_s=self.recorder.progress.train_s,
            replicas_rest=self.config.devices.rests,
            full_reward=self.config.full_reward,
            enough=lambda: enough(self.steps()),
            recording=self.recording,
            made=self._made,
            published=self.role.published,
        )
        return Stage(name="learn", run=self._train, takes=list)

    def check_has_run(self) -> None:
        """Raises BadInput where a recipe made the stage that trains, and ends without running it."""
        if self._train is not None and not self._has_run:
            raise BadInput("the recipe ended without running its stages. Fix: return await job.run([...])")

    async def run(self, stages: Sequence[Stage]) -> dict[str, Any]:
        """Runs the stages to their end, saves the checkpoint, writes the run's files and returns the summary."""
        wiring.check_stages(stages)
        self._has_run = True
        if self.work is not None:
            return await self.work(self)
        pipeline = Pipeline(stages, leases=self.leases)
        self.stats = pipeline.stats
        title = f"rocstar {self.run_folder.path}"
        with Display(title, self.config.steps, self.fleet, self.console, self.timeline.lag) as self._display:
            self.recorder.show_on(self._display)
            try:
                async with asyncio.TaskGroup() as tasks:
                    ticking = tasks.create_task(self._display.tick(), name="display")
                    watching = tasks.create_task(self._watch(), name="watch")
                    following = tasks.create_task(pipeline.watch(), name="vanished")
                    metering = tasks.create_task(self.host.run(), name="host")
                    await self._run(pipeline)
                    ticking.cancel()
                    watching.cancel()
                    following.cancel()
                    metering.cancel()
            except BaseExceptionGroup as failures:  # the caller waits for the error of a part as it is
                raise first_error(failures) from failures
        summary = self._summary()
        command = shlex.join([sys.executable, *sys.argv])
        card = model_card(self.config.title, self.config.checkpoint, command, self.chat.config, summary)
        write_whole(self.run_folder.path / "checkpoint" / "README.md", [card.encode()])
        if self.recording is not None:
            await self.recording.flush()
        self.recorder.draw()
        check_graded(self.recorder.progress.steps)
        self.run_folder.json("summary.json", summary)  # the last file: what has it is not resumed
        diagnosis = self.recorder.diagnosis()
        print_report(self.console, self.run_folder.path, summary, self.recorder.progress, diagnosis)
        if self.nothing_left:
            say(self.console, str(self.nothing_left))
        for gateway, _ in self._gateways.values():
            for line in filter(None, (gateway.refused_line(), gateway.dropped_line())):
                say(self.console, line)
        await self.role.ended()
        return summary

    def note(self, line: str) -> None:
        """Says a line to the user, on the timeline and in notes.log too."""
        line = shortened(line)
        self.timeline.instant("fleet", line)
        self.run_folder.note(line)
        say(self.console, line)

    async def _run(self, pipeline: Pipeline) -> None:
        step = self.fleet.version
        if not self.recorder.progress.has_evaluated(step):  # a run may have ended before an evaluation beside it did
            await self._evaluate_and_record(step, self._due(step))
        self._reached("first evaluation")
        self._phase("training")
        await pipeline.run()
        self.nothing_left = self._train.nothing_left if self._train is not None else None
        if self.nothing_left:  # the last weights are not those of the last step that was planned
            step = self.fleet.version
            left = [scheduled for scheduled in self._evaluations if scheduled not in self._due(step)]
            await self._evaluate_and_record(step, left)
        for scheduled in self._evaluations:
            if scheduled.evaluator is not None:
                self._phase("waiting for the last evaluation")
                await scheduled.evaluator.drain()
        self._phase("saving the checkpoint")
        path, chat = self.run_folder.path / "checkpoint", self.chat
        await self.learner.save(path, chat_template=chat.template, end_of_turn=chat.end_of_turn)

    def _made(self, step: int, groups: Sequence[Group]) -> None:
        self.recorder.failed(f"step {step}", [member for group in groups for member in group.trajectories])

    async def _on_trained(self, step: int, metrics: dict[str, float]) -> None:
        """The weights of a step are live: evaluates them when it is time, and writes the step's numbers down."""
        self._reached("first step")
        metrics = {**metrics, **self.role.trained()}
        self.recorder.step(step, metrics | await self._evaluate(step, self._due(step)))

    def _due(self, step: int) -> list[ScheduledEvaluation]:
        return [scheduled for scheduled in self._evaluations if scheduled.is_due(step, self.config.steps)]

    async def _evaluate_and_record(self, step: int, due: Sequence[ScheduledEvaluation]) -> None:
        """In a row of its own."""
        if found := await self._evaluate(step, due):
            self.recorder.step(step, {**found, "time/train_total_s": self.recorder.progress.train_s})

    async def _evaluate(self, step: int, due: Sequence[ScheduledEvaluation]) -> dict[str, float]:
        """Metrics of the version that is live; none yet of evaluations that run beside training."""
        metrics: dict[str, float] = {}
        for scheduled in due:
            if scheduled.evaluator is not None:
                assert self.fleet.weights is not None
                scheduled.evaluator.submit(step, self.fleet.weights)
                continue
            self._phase(f"evaluating on {len(scheduled.evaluation.prompts)} held-out problems")
            found, trajectories = await scheduled.evaluation.run(step)
            self.recorder.evaluated(step, found, trajectories)
            self._phase("training")
            metrics |= found
        return metrics

    def _loop_stands(self, line: str) -> None:
        """In a thread: the loop cannot say it."""
        self.run_folder.note(line)
        os.write(2, f"{line}\n".encode())

    def _phase(self, text: str) -> None:
        if self._display is not None:
            self._display.phase(text)

    def tokens_sampled(self) -> int:
        return sum(rollouts.tokens_sampled for rollouts in self._rollouts) + self.role.tokens()

    async def _watch(self) -> None:
        await watch(self.tokens_sampled, self.stats, silence_s=1.5 * self.config.step_deadline_s)

    def _check_budget(self, prompts: Sequence[Prompt], rollouts: Rollouts | AgentRollouts) -> None:
        budget = rollouts.config.max_tokens
        shortest = min(len(rollouts.chat.prompt_ids(prompt.messages)) for prompt in prompts)
        if shortest >= budget:
            cause = f"max_tokens={budget} leaves no token for an answer: the shortest of {len(prompts)} held-out"
            raise BudgetTooSmall(f"{cause} prompts has {shortest} tokens. Fix: a larger max_tokens")

    def _learner_process(self) -> LearnerProcessConfig:
        config = self.config
        made = LearnerProcessConfig(module=config.learner_module, step_deadline_s=config.step_deadline_s)
        if config.start_deadline_s is not None:
            made = dataclasses.replace(made, start_deadline_s=config.start_deadline_s)
        return self.role.learner(config.devices.learner(made))

    def _fleet(self, replicas: int, timeline: Timeline, *, pinned: bool) -> Fleet:
        """pinned: each replica has a core of its own, where there are enough."""
        settings = self.config.replicas_config

        def make(index: int, core: int | None, on_step: Callable[[int, KvSample], None]) -> Replica:
            return Replica(settings, index, core if pinned else None, on_step)

        config = FleetConfig(
            replicas=replicas,
            block_size=settings.block_size,
            canary_tolerance=self.config.canary_bound,
            paused_share=PAUSED_SHARE if self.config.max_staleness else 1.0,
            on_update="finish" if self.config.devices.adapters else "continue",
        )
        return Fleet(config, make, self._make_balancer(), timeline, self._canary, self.note)

    def _canary_ids(self) -> list[list[int]]:
        texts = [({"role": "user", "content": text},) for text in CANARY]
        return [self.chat.prompt_ids(messages)[: self.config.rollout.max_tokens] for messages in texts]

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        """Starts the parts; they end on the way out, the last one first."""
        config = self.config
        self._reached("imports")
        async with AsyncExitStack() as self._stack:
            self.workspace = self._stack.enter_context(workspace())
            if self.work is None:
                learner = LearnerProcess(self._learner_process(), self.workspace, self.run_folder.path / "learner.log")
                self.learner = await self._stack.enter_async_context(learner)
            if config.sandbox is not None:
                self._sandbox = await self._stack.enter_async_context(Sandbox(config.sandbox))
            self._reached("sandbox")
            self.chat = ChatTemplate.load(config.checkpoint, config.chat)
            if self.work is None:
                await self._record()
            self._canary = self._canary_ids()
            fleet = self._fleet(config.devices.replicas, self.timeline, pinned=True)
            self.fleet = await self._stack.enter_async_context(fleet)
            self._reached("engines")
            if self.work is None:
                await self._agree_on_first_weights()
                self._reached("learner")
            # A full collection walks the million objects that vLLM and torch brought along: the loop stood for 0.3 s.
            gc.freeze()
            await self._stack.enter_async_context(self.role.beside(self))
            yield

    async def _record(self) -> None:
        """From here on the run is recorded, if it is to be."""
        if not self.config.record.on:
            return

        recording = Recording(
            self.run_folder.path,
            self.config.record,
            self.timeline,
            step=self.state.step + 1,
            tokenizer=self.chat.tokenizer_json,
            note=self.note,
        )
        self.recording = await self._stack.enter_async_context(recording)

    async def _agree_on_first_weights(self) -> None:
        """The learner's weights go to the replicas before anything is sampled."""
        fields = self.config.devices.learner_fields
        if self.config.replicas_config.quantization is not None and self.config.learner.mismatch_tolerance == "auto":
            fields["mismatch_tolerance"] = None  # the sampler is another model, which the loss corrects for
        learner = dataclasses.replace(self.config.learner, **fields)
        message = Configure(
            checkpoint=str(self.config.checkpoint.resolve()),
            learner=dataclasses.asdict(learner),
            canary=self._canary,
            weights_dir=str(self.workspace),
            seed=self.config.seed,
            resume=self.state.checkpoint,
            begin_from=None if self.config.learner_state is None else str(self.config.learner_state.resolve()),
        )
        async with self.fleet.rest():  # the learner may need their devices
            ready, logprobs = await self.learner.configure(message)
        await self.fleet.update_weights(PublishedWeights(ready.weights, ready.version, logprobs))

    def _reached(self, part: str) -> None:
        self._until_first_step.setdefault(part, seconds_since_start())

    def _summary(self) -> dict[str, Any]:
        assert self._display is not None
        missed = [self.recorder.progress.missed(scheduled.every) for scheduled in self._evaluations[:1]]
        return {
            **self.recorder.summary(),
            "loop_blocked_at": self.host.blocked_at,
            "ended": str(self.nothing_left or "all steps are trained"),
            "first_step_s": self._until_first_step.get("first step"),  # None: all steps were trained before
            "first_step_parts_s": durations(self._until_first_step),
            "total_wall_s": seconds_since_start(),
            "evaluations_dropped": sum(missed),
            "canary_max_abs": self.fleet.canary_max_abs,
            "replica_deaths": self.fleet.deaths,
            "preemptions": self.fleet.preemptions,
            "requests_refused": sum(gateway.counts.refused for gateway, _ in self._gateways.values()),
            "loop_lag_p99_ms": float(np.percentile(self._display.lags_s or [0.0], 99)) * 1e3,
            "versions": versions(),
        }


@asynccontextmanager
async def training(
    config: TrainingConfig,
    run: Run,
    *,
    make_balancer: Callable[[], Balancer] | None = None,
    sinks: Sequence[MetricSink] = (),
    console: Console | None = None,
) -> AsyncIterator[Training]:
    """Starts learner, replicas and sandbox, agrees on the first weights, and restores what the run's folder holds.

    make_balancer: the placement of each fleet (`KvAware` without moves by default). sinks: get the metrics too, and are
    closed at the end. Timeline and plot are written also
    when the run is interrupted. Raises one of EXPECTED when a part cannot start.
    """
    wiring.require(
        config,
        isinstance(config, TrainingConfig),
        "training must be given a TrainingConfig",
        "training(config.training(), run), where config.training() makes one of the options",
    )
    wiring.check_sinks(sinks)
    wiring.require(run, isinstance(run, Run), "training must be given the run", "training(..., run)")
    opens = run.opens or _alone
    console = console or Console()
    async with opens(config, run.folder, make_balancer=make_balancer, sinks=sinks, console=console) as job:
        yield job


def _alone(config: TrainingConfig, run: RunFolder, **options: Any) -> AbstractAsyncContextManager[Training]:
    return opened(Training(config, run, **options))


@asynccontextmanager
async def opened(job: Training) -> AsyncIterator[Training]:
    """A run whose parts are started inside."""
    config, run, console = job.config, job.run_folder, job.console
    if run.resumed:
        say(console, job.recorder.resume_message)
        run.extend(config.steps)
    learner = "the learner, " if job.work is None else ""
    say(console, f"starting {learner}{config.devices.replicas} vLLM engines and what else the recipe needs")
    try:
        with noted_warnings(job.note), shows_on_signal(lambda: job.stats()):
            async with job._open():
                yield job
                job.check_has_run()
    except BaseException:
        job.recorder.draw_what_is_there()
        raise
    finally:
        job.recorder.sinks.close()


async def _elsewhere(inbox: Inbox, outbox: Outbox) -> None:
    raise AssertionError("the learner runs on another machine")


def say(console: Console, line: str) -> None:
    """A line for the user, as it is but for what a terminal would obey."""
    console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def durations(reached: Mapping[str, float]) -> dict[str, float]:
    """What each part took, from when it ended.

    >>> durations({"imports": 2.0, "engines": 5.5})
    {'imports': 2.0, 'engines': 3.5}
    """
    return {part: end - begin for (part, end), begin in zip(reached.items(), [0.0, *reached.values()], strict=False)}


def seconds_since_start() -> float:
    """Since this process began."""
    return time.time() - psutil.Process().create_time()
