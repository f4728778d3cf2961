"""Opens the parts of a run: learner, replicas, sandbox and journal, restored if the run was interrupted.

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
- An interrupted run is resumed by opening it again: leases, journal, learner state and metrics are restored here, and
  the recipe does nothing for it.
- Replicas and learner agree on the first weights before anything is sampled.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from engine import metric_names as metric
from engine.assembly import cpu_notes, wiring
from engine.assembly.config import TrainingConfig
from engine.assembly.evaluations import EvaluationSchedule, ScheduledEvaluation
from engine.assembly.expected import BudgetTooSmall
from engine.assembly.gpu_notes import missing
from engine.assembly.learner import agree_on_first_weights, canary_of, process_of
from engine.assembly.openmetrics import RunSources, Scraped, scraped
from engine.assembly.parts import Parts, started
from engine.assembly.startup import Startup, seconds_since_start
from engine.atomic_files import write_whole
from engine.balancing.balancer import Balancer
from engine.balancing.kv_aware import KvAware
from engine.console.display import Display
from engine.console.notes import Notes, say
from engine.console.recorder import RunRecorder
from engine.console.report import model_card, print_report
from engine.errors import BadInput, first_error
from engine.fleet.config import PAUSED_SHARE, FleetConfig
from engine.fleet.fleet import Fleet
from engine.gateway.agent import Agent, AgentRollouts
from engine.gateway.gateway import Gateway, GatewayConfig
from engine.gateway.http.server import ServerConfig, serve
from engine.gateway.program import PROGRAMS, Command
from engine.learner.process import LearnerProcess, LearnerProcessConfig
from engine.pipeline.leases import Leases
from engine.pipeline.pipeline import Inbox, Outbox, Pipeline, Stage, StageStats
from engine.pipeline.worker_clock import Period
from engine.ports import GroupReward, Reward, StatefulTool, Tool, World
from engine.recipe import Run
from engine.recording.groups import Explain
from engine.recording.in_flight import keep_written
from engine.recording.recording import Recording
from engine.replica.config import prepare_environment
from engine.replica.port import KvSample
from engine.replica.replica import Replica
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.rollout import Rollouts
from engine.rollout.source import RolloutSource
from engine.run.resume import RunState
from engine.run.run_folder import RunFolder, versions
from engine.run.step_history import StepHistory
from engine.run.workspace import workspace
from engine.stages.admit import AdmittedPrompt, admit
from engine.stages.batch import batch_groups
from engine.stages.empty_batches import NothingLeft, check_graded
from engine.stages.evaluate import Estimate, Evaluation, Evaluator
from engine.stages.group import GroupMaker, MakeGroup, groups
from engine.stages.train import TrainStage
from engine.telemetry.gpu_meter import GpuMeter
from engine.telemetry.host_meter import HostMeter
from engine.telemetry.noted_warnings import noted_warnings
from engine.telemetry.sinks import MetricSink
from engine.telemetry.timeline import Timeline
from engine.telemetry.watchdog import shows_on_signal, watch
from engine.types import Batch, Group, Prompt, PublishedWeights
from sandbox import Sandbox
from sandbox.http.listener import Address
from sandbox.require import at_least, require

EVERY_ADDRESS = ("", "0.0.0.0", "::")


class Role(Protocol):
    """The role of this machine in a run: `Alone` has the run to itself, `engine.programs.roles.Leads` leads others."""

    def learner(self, config: LearnerProcessConfig) -> LearnerProcessConfig:
        """Returns how the learner is started."""

    def beside(self, job: Training) -> AbstractAsyncContextManager[object]:
        """Returns a context that is open as long as the parts are."""

    def groups(self, here: GroupMaker) -> MakeGroup | None:
        """Returns what makes the groups that the stages ask for. None: `here`, on this machine's replicas."""

    def published(self, weights: PublishedWeights) -> None:
        """Is told of new weights of the learner."""

    def trained(self) -> Mapping[str, float]:
        """Is told that a step's weights are live on the replicas here. Returns further metrics of the step."""

    def tokens(self) -> int:
        """Returns the number of tokens sampled elsewhere so far."""

    async def ended(self) -> None:
        """Is told that the run has written its summary."""


# Makes a fleet of so many replicas. Its last argument: each has a core of its own, if there are enough.
MakeFleet = Callable[[int, Timeline, bool], Fleet]

# Takes the place of the stages on a machine without a learner. Returns what `train` returns.
Work = Callable[["Training"], Coroutine[Any, Any, dict[str, Any]]]


class Alone:
    """The role of a machine that has the run to itself."""

    def learner(self, config: LearnerProcessConfig) -> LearnerProcessConfig:
        return config

    def beside(self, job: Training) -> AbstractAsyncContextManager[object]:
        return nullcontext()

    def groups(self, here: GroupMaker) -> MakeGroup | None:
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

    def __init__(
        self,
        config: TrainingConfig,
        run: RunFolder,
        *,
        state: RunState,
        recorder: RunRecorder,
        note: Notes,
        console: Console,
        parts: Parts,
        make_fleet: MakeFleet,
        stack: AsyncExitStack,
        workspace: Path,
        startup: Startup,
        learner: LearnerProcess | None,
        recording: Recording | None,
        role: Role,
        work: Work | None,
    ) -> None:
        """stack: ends what the recipe opens (gateways, replicas of an evaluation). workspace: a private folder in
        shared memory for published weights and local sockets. learner: None where `work` takes the place of the stages.
        """
        self.config, self.run_folder, self.console = config, run, console
        self.state, self.journal, self.recorder, self.note = state, state.journal, recorder, note
        self.chat, self.fleet, self.timeline, self.workspace = parts.chat, parts.fleet, parts.timeline, workspace
        self.learner, self.recording, self.role, self.work = learner, recording, role, work
        self.leases = Leases(config.prompts_per_step, config.max_staleness, state.step)
        self.steps = StepHistory(
            lambda: recorder.progress.steps,
            prompts_per_step=config.prompts_per_step,
            max_staleness=config.max_staleness,
            path=run.path / "curriculum.jsonl",
        )
        self.host = HostMeter(say=self._report_blocked, end=lambda: os._exit(1), silence_s=1.5 * config.step_deadline_s)
        self.gpus = GpuMeter(config.devices.devices, say=self._report_blocked)
        self.stats: Callable[[], list[StageStats]] = list  # the pipeline's, once there is one
        self._drain_periods: Callable[[], list[Period]] = list  # the same
        self.maker: GroupMaker | None = None  # the recipe's rollouts and reward, once its stages are listed
        self.nothing_left: NothingLeft | str | None = None  # set when the run ends before its last step
        self._parts, self._make_fleet, self._stack, self._startup = parts, make_fleet, stack, startup
        self._prompts: Iterator[Prompt] = iter(())
        self._rollouts: list[RolloutSource] = []
        self._gateways: dict[tuple[str, str], tuple[Gateway, str]] = {}  # (host, token) -> the gateway and its address
        self._schedule = self._scheduled(())
        self._train: TrainStage | None = None
        self._explain: Explain | None = None  # the selection's `explain`, once the stages are listed
        self._display: Display | None = None
        self._has_run = False

    @property
    def sandbox(self) -> Sandbox:
        """Returns the sandbox. Raises ValueError if the configuration has none."""
        return self._parts.sandbox

    def rollouts(self, tools: Sequence[Tool | StatefulTool | World | Callable[..., Any]]) -> Rollouts:
        """Returns rollouts on the run's replicas with these tools (`Parts.rollouts`)."""
        rollouts = self._parts.rollouts(tools)
        self._rollouts.append(rollouts)
        return rollouts

    async def agents(
        self, agent: Agent, *, at_once: int | None = None, host: str = "127.0.0.1", token: str = ""
    ) -> AgentRollouts:
        """Returns rollouts that an agent of yours makes with the run's replicas, through a gateway on this machine.

        at_once: agents that run at once; None: 64 programs (`Command`), any number of coroutines. host: this machine's
        address for agents in containers or on other machines, which then need a token; it is their endpoint's API key.
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
        rollouts = AgentRollouts(
            agent,
            self.config.rollout,
            gateway,
            address=address,
            model=model,
            seed=seed,
            token=token,
            at_once=PROGRAMS if at_once is None and isinstance(agent, Command) else at_once,
        )
        self._rollouts.append(rollouts)
        return rollouts

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
        """Returns an evaluation on held-out prompts, for `train`. replicas: its own, beside training; 0: the training
        replicas run it between steps. Raises BudgetTooSmall if no prompt leaves room for an answer.
        """
        require("every", every, at_least(1))
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
        timeline = Timeline()  # not recorded: its replicas are numbered as those that train
        fleet = await self._stack.enter_async_context(self._make_fleet(replicas, timeline, False))
        own_rollouts = rollouts.on(fleet, timeline)
        self._rollouts.append(own_rollouts)
        evaluation = Evaluation(prompts, samples, own_rollouts, reward, estimate, timeline, grade_deadline_s=deadline_s)
        evaluator = Evaluator(evaluation, fleet, self.recorder.background_evaluation, self.workspace)
        await self._stack.enter_async_context(evaluator)
        return ScheduledEvaluation(evaluation=evaluation, every=every, evaluator=evaluator)

    def admit(self, prompts: Iterator[Prompt]) -> Stage:
        """Returns the stage that admits prompts. prompts: the whole stream; a resumed run skips what it drew of it."""
        wiring.check_stream(prompts)
        self._prompts = wiring.checked(self.journal.after(prompts), self.journal.position, self.note)
        waiting = partial(self.timeline.idle_cause, "lease")
        return Stage(name="admit", run=admit(self._prompts, self.leases, self.config.steps, self.journal, waiting))

    def group(self, rollouts: RolloutSource, reward: Reward | GroupReward, select: Callable[[Group], Group]) -> Stage:
        """Returns the stage that makes a graded group per prompt, and selects what is trained.

        A group that is given up is replaced by one of the next prompt of `admit`.
        """
        wiring.check_rollouts(rollouts)
        wiring.check_reward(reward)
        wiring.check_select(select)
        self._explain = getattr(select, "explain", None)
        self.maker = GroupMaker(rollouts=rollouts, reward=reward, config=self.config.group, timeline=self.timeline)
        elsewhere = self.role.groups(self.maker)
        refills = self._refills()
        run = groups(
            rollouts, reward, select, refills, self.config.group, self.timeline, self.journal, make_group=elsewhere
        )
        workers = self.config.prompts_per_step if elsewhere is None else self.leases.capacity
        return Stage(name="groups", run=run, workers=workers, takes=AdmittedPrompt)

    def _refills(self) -> Iterator[Prompt]:
        """Yields the prompts of `admit`, which may be called later."""
        yield from self._prompts

    def batch(self) -> Stage:
        """Returns the stage that puts the groups of a step together."""
        return Stage(name="batch", run=batch_groups(self.leases), takes=Group, collects=True)

    def train(
        self,
        make_batch: Callable[[int, Sequence[Group]], Batch],
        *,
        evaluations: Sequence[ScheduledEvaluation] = (),
        enough: Callable[[Sequence[Mapping[str, float]]], str | None] = lambda steps: None,
        measure: Callable[[Sequence[Group]], Mapping[str, float]] = lambda groups: {},
    ) -> Stage:
        """Returns the stage that trains, brings the new weights to all replicas, and runs the evaluations that are due.

        enough: is called with the rows of all steps so far; it returns a reason to end the run there, or None.
        measure: is called with a step's groups; it returns further metrics of the step, by names of your own.
        """
        wiring.check_make_batch(make_batch)
        wiring.check_evaluations(evaluations, ScheduledEvaluation)
        wiring.check_enough(enough)
        if self.work is not None:
            return Stage(name="learn", run=_learns_elsewhere)
        assert self.learner is not None
        self._schedule = self._scheduled(evaluations)
        self._train = TrainStage(
            learner=self.learner,
            fleet=self.fleet,
            leases=self.leases,
            make_batch=make_batch,
            on_trained=self._on_trained,
            stats=lambda: self.stats(),
            timeline=self.timeline,
            host=lambda: self.host.read() | self.gpus.read(),
            state=self.state,
            checkpoint_every=self.config.checkpoint_every,
            train_s=self.recorder.progress.train_s,
            replicas_rest=self.config.devices.rests,
            full_reward=self.config.full_reward,
            enough=lambda: enough(self.steps()),
            recording=self.recording,
            explain=self._explain_choices,
            made=self._record_failures,
            measure=measure,
            published=self.role.published,
        )
        return Stage(name="learn", run=self._train, takes=list)

    def check_has_run(self) -> None:
        """Raises BadInput if a recipe made the stage that trains, and ends without running it."""
        if self._train is not None and not self._has_run:
            raise BadInput("the recipe ended without running its stages. Fix: return await job.run([...])")

    async def run(self, stages: Sequence[Stage]) -> dict[str, Any]:
        """Runs the stages to their end, saves the checkpoint, writes the run's files and returns the summary."""
        wiring.check_stages(stages)
        self._has_run = True
        if self.work is not None:
            return await self.work(self)
        pipeline = Pipeline(stages, leases=self.leases, works=self._stage_works)
        self.stats, self._drain_periods = pipeline.stats, pipeline.drain_periods
        title = f"rocstar {self.run_folder.path}"
        with Display(title, self.config.steps, self.fleet, self.console, self.timeline.lag) as self._display:
            self.recorder.show_on(self._display)
            try:
                async with asyncio.TaskGroup() as tasks:
                    ticking = tasks.create_task(self._display.tick(), name="display")
                    watching = tasks.create_task(self._watch(), name="watch")
                    following = tasks.create_task(pipeline.watch(), name="vanished")
                    metering = tasks.create_task(self.host.run(), name="host")
                    listing = tasks.create_task(self._list_rollouts(), name="in-flight")
                    asking = tasks.create_task(self.gpus.run(), name="gpus")
                    await self._run(pipeline)
                    ticking.cancel()
                    watching.cancel()
                    following.cancel()
                    metering.cancel()
                    listing.cancel()
                    asking.cancel()
            except BaseExceptionGroup as failures:  # callers expect the error of a part itself
                raise first_error(failures) from failures
        summary = self._summary()
        command = shlex.join([sys.executable, *sys.argv])
        card = model_card(self.config.title, self.config.checkpoint, command, self.chat.config, summary)
        write_whole(self.run_folder.path / "checkpoint" / "README.md", [card.encode()])
        if self.recording is not None:
            await self.recording.flush()
        self.recorder.draw()
        check_graded(self.recorder.progress.steps)
        self.run_folder.json("summary.json", summary)  # written last: a run that has it is over
        diagnosis = self.recorder.diagnosis(ended=True)
        print_report(self.console, self.run_folder.path, summary, self.recorder.progress, diagnosis)
        if self.nothing_left:
            say(self.console, str(self.nothing_left))
        for gateway, _ in self._gateways.values():
            for line in filter(None, (gateway.refused_line(), gateway.overruled_line(), gateway.dropped_line())):
                say(self.console, line)
        await self.role.ended()
        return summary

    def _stage_works(self, stage: str, does: bool) -> None:
        """Notes whether a stage of the user's works, which may be why replicas are idle."""
        if stage not in metric.OWN_STAGES:
            self.timeline.idle.flag("stage", 1 if does else -1, self.timeline.now())

    async def _run(self, pipeline: Pipeline) -> None:
        await self._schedule.begin()
        self._startup.reached("first evaluation")
        self._phase("training")
        await pipeline.run()
        self.nothing_left = self._train.nothing_left if self._train is not None else None
        await self._schedule.end(early=self.nothing_left is not None)
        self._phase("saving the checkpoint")
        assert self.learner is not None
        path, chat = self.run_folder.path / "checkpoint", self.chat
        await self.learner.save(path, chat_template=chat.template, end_of_turn=chat.end_of_turn)

    def _explain_choices(self, group: Group) -> Sequence[Mapping[str, float]]:
        """Returns what the selection says of its choices, for each trajectory; nothing if it has no `explain`."""
        return [{}] * len(group.trajectories) if self._explain is None else self._explain(group)

    def _record_failures(self, step: int, groups: Sequence[Group]) -> None:
        self.recorder.failed(f"step {step}", [member for group in groups for member in group.trajectories])

    async def _on_trained(self, step: int, metrics: dict[str, float]) -> None:
        """Evaluates the weights of a step, which are live, if that is due, and records the step's metrics."""
        self._startup.reached("first step")
        for period in self._drain_periods():
            self.timeline.span("stages", period.stage, period.start, period.end, period.place)
        metrics = {**metrics, **self.role.trained()}
        self.recorder.step(step, metrics | await self._schedule.step(step))

    def _scheduled(self, evaluations: Sequence[ScheduledEvaluation]) -> EvaluationSchedule:
        return EvaluationSchedule(
            evaluations, self.fleet, self.recorder, last=self.config.steps, phase=lambda text: self._phase(text)
        )

    def _report_blocked(self, line: str) -> None:
        """Reports that the event loop is blocked. A thread calls it, since the loop cannot."""
        self.run_folder.note(line)
        os.write(2, f"{line}\n".encode())

    def _phase(self, text: str) -> None:
        if self._display is not None:
            self._display.phase(text)

    def tokens_sampled(self) -> int:
        return sum(rollouts.tokens_sampled for rollouts in self._rollouts) + self.role.tokens()

    def sources(self) -> RunSources:
        """Returns where `engine.assembly.openmetrics` reads the metrics of the run."""
        return RunSources(
            run=self.run_folder,
            steps=self.config.steps,
            begun=self.timeline.now(),
            timeline=self.timeline,
            fleet=self.fleet,
            recorder=self.recorder,
            stats=lambda: self.stats(),
            tokens=self.tokens_sampled,
        )

    async def _watch(self) -> None:
        await watch(self.tokens_sampled, self.stats, silence_s=1.5 * self.config.step_deadline_s)

    async def _list_rollouts(self) -> None:
        groups = self.config.prompts_per_step
        await keep_written(self.run_folder.path, self.timeline.in_flight, groups_per_step=groups, note=self.note)

    def _check_budget(self, prompts: Sequence[Prompt], rollouts: Rollouts | AgentRollouts) -> None:
        budget = rollouts.config.max_tokens
        shortest = min(len(rollouts.chat.prompt_ids(prompt.messages)) for prompt in prompts)
        if shortest >= budget:
            cause = f"max_tokens={budget} leaves no token for an answer: the shortest of {len(prompts)} held-out"
            raise BudgetTooSmall(f"{cause} prompts has {shortest} tokens. Fix: a larger max_tokens")

    def _summary(self) -> dict[str, Any]:
        assert self._display is not None
        return {
            **self.recorder.summary(),
            "loop_blocked_at": self.host.blocked_at,
            "ended": str(self.nothing_left or "all steps are trained"),
            "first_step_s": self._startup.first_step_s,
            "first_step_parts_s": self._startup.parts_s,
            "total_wall_s": seconds_since_start(),
            "evaluations_dropped": self._schedule.missed,
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
    closed at the end. Timeline and plot are written even if the run is interrupted. Raises one of EXPECTED if a part
    cannot start.
    """
    wiring.require(
        config,
        isinstance(config, TrainingConfig),
        "training must be given a TrainingConfig",
        "training(config.training(), run), where config.training() makes one of the options",
    )
    wiring.check_sinks(sinks)
    wiring.require(run, isinstance(run, Run), "training must be given the run", "training(..., run)")
    if run.opens is None:
        config.check_ranks(hosts=1)
    opens, console = run.opens or opened, console or Console()
    async with AsyncExitStack() as stack:
        served: Scraped | None = None
        if run.metrics_port is not None:  # before the parts start: a port that is taken is said at once
            served = await stack.enter_async_context(scraped(run.folder, run.metrics_port))
            say(console, f"metrics for Prometheus at {served.url}")
        parts = opens(config, run.folder, make_balancer=make_balancer, sinks=sinks, console=console)
        job = await stack.enter_async_context(parts)
        if served is not None:
            served.follow(job.sources())
        yield job


@asynccontextmanager
async def opened(
    config: TrainingConfig,
    run: RunFolder,
    *,
    make_balancer: Callable[[], Balancer] | None,
    sinks: Sequence[MetricSink],
    console: Console,
    note: Notes | None = None,
    role: Role | None = None,
    work: Work | None = None,
) -> AsyncIterator[Training]:
    """Starts the parts of a run, which end when it is left, the last one first. work: takes the place of the stages;
    there is then neither a learner nor a record.
    """
    if work is None and not config.devices.learner_ranks:
        raise BadInput("learner_ranks must be at least 1, got 0: only a rollout node (`rocstar node`) has no learner")
    role, startup = role or Alone(), Startup()
    startup.reached("imports")
    prepare_environment()
    gc.set_threshold(50_000, 20, 1_000_000)  # importing vLLM makes a million objects
    note = note or Notes(run=run, console=console, timeline=Timeline())
    state = RunState.open(run, config.prompts_per_step)
    recorder = RunRecorder(run, state, note.timeline, title=config.title, sinks=sinks)
    if run.resumed:
        say(console, recorder.resume_message)
        run.extend(config.steps)
    learner = "" if work is not None else "the learner, "
    say(console, f"starting {learner}{config.devices.replicas} vLLM engines and what else the recipe needs")
    job: Training | None = None
    try:
        with noted_warnings(note), shows_on_signal(lambda: [] if job is None else job.stats()):
            async with AsyncExitStack() as stack:
                job = await _start(
                    config,
                    run,
                    stack,
                    state=state,
                    recorder=recorder,
                    note=note,
                    console=console,
                    startup=startup,
                    make_balancer=make_balancer,
                    role=role,
                    work=work,
                )
                yield job
                job.check_has_run()
    except BaseException:
        recorder.draw_what_is_there()
        raise
    finally:
        recorder.sinks.close()


async def _start(
    config: TrainingConfig,
    run: RunFolder,
    stack: AsyncExitStack,
    *,
    state: RunState,
    recorder: RunRecorder,
    note: Notes,
    console: Console,
    startup: Startup,
    make_balancer: Callable[[], Balancer] | None,
    role: Role,
    work: Work | None,
) -> Training:
    learner_devices = config.devices.learner_devices if work is None else ()
    lacking = await asyncio.to_thread(missing, config.replicas_config, learner_devices)
    if not config.devices.devices:
        lacking += cpu_notes.lacks([config.replicas_config.dtype, getattr(config.learner, "dtype", "")])
    for line in lacking:
        note(line)
    folder, learner, recording = stack.enter_context(workspace()), None, None
    if work is None:
        process = LearnerProcess(role.learner(process_of(config)), folder, run.path / "learner.log")
        learner = await stack.enter_async_context(process)
    chat = ChatTemplate.load(config.checkpoint, config.chat)
    if work is None and config.record.on:
        recording = await stack.enter_async_context(
            Recording(
                run.path, config.record, note.timeline, step=state.step + 1, tokenizer=chat.tokenizer_json, note=note
            )
        )
    canary = canary_of(chat, config.rollout.max_tokens)
    # A moved request continues under another seed, so nothing moves by default.
    balancer = make_balancer or partial(KvAware, config.rollout.max_tokens, moves=0)

    def make_fleet(replicas: int, timeline: Timeline, pinned: bool) -> Fleet:
        return fleet_of(config, replicas, timeline, balancer=balancer(), canary=canary, note=note, pinned=pinned)

    parts = await stack.enter_async_context(
        started(
            rollout=config.rollout,
            seed=config.seed,
            chat=chat,
            fleet=make_fleet(config.devices.replicas, note.timeline, True),
            timeline=note.timeline,
            sandbox=config.sandbox,
            reached=startup.reached,
        )
    )
    if learner is not None:
        gaps = await agree_on_first_weights(learner, parts.fleet, config, state, canary=canary, weights_dir=folder)
        if gaps:
            note(gaps)
        startup.reached("learner")
    # A full collection would walk the million objects of vLLM and torch, and block the loop for 0.3 s.
    gc.freeze()
    job = Training(
        config,
        run,
        state=state,
        recorder=recorder,
        note=note,
        console=console,
        parts=parts,
        make_fleet=make_fleet,
        stack=stack,
        workspace=folder,
        startup=startup,
        learner=learner,
        recording=recording,
        role=role,
        work=work,
    )
    await stack.enter_async_context(role.beside(job))
    return job


def fleet_of(
    config: TrainingConfig,
    replicas: int,
    timeline: Timeline,
    *,
    balancer: Balancer,
    canary: Sequence[Sequence[int]],
    note: Callable[[str], None],
    pinned: bool,
) -> Fleet:
    """Returns a fleet of a run's replicas. pinned: each replica has a core of its own, if there are enough."""
    settings = config.replicas_config

    def make(index: int, core: int | None, on_step: Callable[[int, KvSample], None]) -> Replica:
        return Replica(settings, index, core if pinned else None, on_step)

    fleet = FleetConfig(
        replicas=replicas,
        block_size=settings.block_size,
        canary_tolerance=config.canary_bound,
        canary_one_token=config.canary_one_token,
        paused_share=PAUSED_SHARE if config.max_staleness else 1.0,
        on_update="finish" if config.devices.adapters else "continue",
    )
    return Fleet(fleet, make, balancer, timeline, canary, note)


async def _learns_elsewhere(inbox: Inbox, outbox: Outbox) -> None:
    raise AssertionError("the learner runs on another machine")
