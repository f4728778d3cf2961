"""Trains a tiny agent on a laptop CPU to write and run Python instead of guessing, by GRPO-RoC.

    python recipes/quickstart.py [field=value ...]        (--help lists the fields)

Reads top to bottom: configuration, the parts, the pipeline, what is written down. Everything is the real thing: vLLM
replicas, jailed tool calls over ZeroMQ, an FSDP learner in its own process.
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.process import streams

if __name__ == "__main__":
    streams.prepare()  # before other imports open files

import asyncio
import dataclasses
import gc
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal

from engine.replica.replica import Replica, ReplicaConfig, prepare_environment

prepare_environment()
gc.set_threshold(50_000, 20, 1_000_000)  # imports make objects by the million; Learn collects the oldest once a step

import numpy as np
import uvloop
from rich.console import Console

from algo.eval_stats import avg_at_k
from algo.group.batch import make_batch, select_and_score
from algo.group.roc import RoC
from algo.group.selection import KeepAll, RandomSubset
from algo.learner.learner import LearnerConfig
from algo.reward.math_reward import MathReward
from engine.balancing.kv_aware import KvAware
from engine.devices import Placement
from engine.fleet.canary import CanaryFailed, Weights, tolerance_of
from engine.fleet.fleet import Fleet, FleetConfig
from engine.learner.process import Configure, LearnerDied, LearnerProcess, LearnerProcessConfig, visible
from engine.pipeline.leases import Leases
from engine.pipeline.pipeline import Pipeline, Stage, StageStats
from engine.ports import KvSample, ReplicaDied, Selector
from engine.rollout.chat_template import Chat, TemplateError
from engine.rollout.python_tool import PythonTool
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.run.checkpoints import Unresumable
from engine.run.resume import RunState
from engine.run.run_folder import DiskFull, RunFolder, Unfinished, versions
from engine.run.workspace import workspace
from engine.stages import admit as stages
from engine.stages.empty_batches import NothingLeft, NothingToTrain
from engine.stages.evaluate import Evaluation, Evaluator
from engine.stages.group import GroupConfig, groups
from engine.stages.train import Learn
from engine.telemetry.timeline import Timeline
from engine.telemetry.watchdog import Stuck, dump, end_on_signals, leave, watch
from recipes.display import Display
from recipes.options import overrides, parse
from recipes.recorder import Book
from recipes.report import print_report
from recipes.tiny.task import SHIPPED, prompts
from sandbox import TIERS, Limits, Sandbox, SandboxConfig, SandboxUnavailable


class BudgetTooSmall(ValueError):
    """No prompt leaves room for an answer."""


EXPECTED = (TemplateError, Unresumable, DiskFull, SandboxUnavailable, LearnerDied, ReplicaDied, CanaryFailed, Stuck)
EXPECTED += (NothingToTrain, BudgetTooSmall)
MAX_EVALUATED = 100_000  # an evaluation holds all its trajectories, and a task of each


@dataclass(frozen=True, kw_only=True)
class Config:
    name: Annotated[str, "folder of the run under runs/"] = "quickstart"
    runs: Annotated[Path, "where runs are written"] = Path("runs")
    fresh: Annotated[bool, "a new run, also when the last one of that name did not end and could be resumed"] = False
    checkpoint_every: Annotated[int, "steps between checkpoints; the journal has what follows"] = 4
    checkpoint: Annotated[Path, "Hugging Face folder to start from"] = SHIPPED
    algorithm: Annotated[Literal["roc", "grpo", "random"], "roc keeps clean successes; random: control"] = "roc"
    steps: Annotated[int, "optimizer batches; a run that ended goes on when there are more than it had"] = 40
    prompts_per_step: Annotated[int, "groups per step (B)"] = 16
    group_size: Annotated[int, "trajectories trained per group (G)"] = 8
    oversample: Annotated[int, "rollouts per trained trajectory for roc and random (2: the paper's 2G)"] = 2
    extra_samples: Annotated[int, "rollouts per group beyond those needed; the slowest are cancelled"] = 0
    stop_flat_after: Annotated[int | None, "equal rewards after which a group is stopped as flat"] = None
    refills: Annotated[int, "other prompts that may replace a group of which nothing would be trained"] = 0
    max_staleness: Annotated[int, "versions that a trained token may be old (S); 0 is strictly on-policy"] = 0
    learning_rate: Annotated[float, "AdamW, constant after 3 warm-up steps"] = 5e-4
    minibatches: Annotated[int, "optimizer updates per step"] = 2
    max_tokens: Annotated[int, "of a whole trajectory, prompt included"] = 230
    max_turns: Annotated[int, "assistant turns of a trajectory (one more than tool calls)"] = 4
    eval_every: Annotated[int, "steps between evaluations"] = 8
    eval_problems: Annotated[int, "held-out problems"] = 512
    eval_samples: Annotated[int, "samples per held-out problem (k of avg@k)"] = 1
    eval_replicas: Annotated[int, "engines that evaluate beside training; 0: the replicas do, between steps"] = 0
    replicas: Annotated[int, "vLLM engines"] = 2
    devices: Annotated[tuple[int, ...], "GPUs, the learner's first, or all by turns; none: the CPU"] = ()
    kv_blocks: Annotated[int, "KV cache blocks of 32 tokens per replica"] = 2048
    learner_ranks: Annotated[int, "FSDP ranks"] = 1
    slots: Annotated[int, "tool calls that run at once"] = 8
    tool_wall_s: Annotated[float, "time limit of a tool call"] = 2.0
    seed: Annotated[int, "of the run: prompts, sampling, selection, training order"] = 0

    def __post_init__(self) -> None:
        ones = "steps checkpoint_every prompts_per_step oversample eval_every eval_problems eval_samples replicas "
        ones += "kv_blocks learner_ranks minibatches max_turns slots"
        for field, least in {**dict.fromkeys(ones.split(), 1), "group_size": 2, "eval_replicas": 0, "seed": 0}.items():
            if getattr(self, field) < least:
                raise ValueError(f"{field} must be at least {least}, got {getattr(self, field)}")
        if self.name in ("", "..") or Path(self.name).name != self.name:
            raise ValueError(f"name must be that of a folder, got {self.name!r}")
        if self.eval_replicas and self.devices:
            raise ValueError(f"eval_replicas must be 0 on GPUs, got {self.eval_replicas}")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.minibatches > (trained := self.prompts_per_step * self.group_size):
            raise ValueError(f"minibatches={self.minibatches} exceeds prompts_per_step x group_size = {trained}")
        if (evaluated := self.eval_problems * self.eval_samples) > MAX_EVALUATED:
            raise ValueError(f"eval_problems x eval_samples must be at most {MAX_EVALUATED}, got {evaluated}")
        if self.max_staleness > self.steps:
            raise ValueError(f"max_staleness must be at most steps={self.steps}, got {self.max_staleness}")
        Leases(self.prompts_per_step, self.max_staleness)  # the parts' own checks, before anything starts
        _ = self.group, self.budget, self.replica, self.placement, self.learner, self.jail, visible(self.devices)
        if not (self.checkpoint / "config.json").is_file():
            make = f"give a Hugging Face folder, or make one with {sys.executable} recipes/tiny/cold_start.py"
            cause = f"checkpoint: no config.json in {str(self.checkpoint)!r}, and nothing is downloaded from a hub"
            raise ValueError(f"{cause}; {make}")

    @property
    def selector(self) -> Selector:
        keep = self.group_size
        return {"roc": RoC(keep=keep), "random": RandomSubset(keep=keep), "grpo": KeepAll()}[self.algorithm]

    @property
    def group(self) -> GroupConfig:
        """samples: 2G for RoC, G for GRPO."""
        samples = self.group_size * (1 if self.algorithm == "grpo" else self.oversample)
        extras = {name: getattr(self, name) for name in ("extra_samples", "stop_flat_after", "refills")}
        return GroupConfig(samples=samples, **extras)

    @property
    def budget(self) -> RolloutConfig:
        return RolloutConfig(max_tokens=self.max_tokens, max_turns=self.max_turns)

    @property
    def replica(self) -> ReplicaConfig:
        """max_model_len: max_tokens and a block to spare."""
        sizes = {"max_model_len": self.max_tokens + 32, "kv_blocks": self.kv_blocks}
        return self.placement.replica(ReplicaConfig(checkpoint=str(self.checkpoint), **sizes))

    @property
    def placement(self) -> Placement:
        counts = {"ranks": self.learner_ranks, "replicas": self.replicas}
        return Placement(devices=self.devices, max_staleness=self.max_staleness, **counts)

    @property
    def learner(self) -> LearnerConfig:
        return LearnerConfig(lr=self.learning_rate, minibatches=self.minibatches, **self.placement.learner_fields)

    @property
    def jail(self) -> SandboxConfig:
        """No import needs another tier. start_s: beside engines and learner, on busy cores, that takes long."""
        limits = Limits(wall_s=self.tool_wall_s, cpu_s=self.tool_wall_s, memory_bytes=512 << 20)
        return SandboxConfig(slots=self.slots, limits=limits, tiers=TIERS[:1], start_s=60)


class Quickstart:
    """The parts of the run, started once, and what is written down of each step."""

    def __init__(self, config: Config, run: RunFolder, console: Console) -> None:
        self.config, self.run_folder, self.console = config, run, console
        self.state = RunState.open(run, config.prompts_per_step)
        self.timeline = Timeline()
        self.leases = Leases(config.prompts_per_step, config.max_staleness, self.state.step)
        self.reward = MathReward(integers_only=True)
        self.held_out = list(islice(prompts("test", 0), config.eval_problems))
        self.book = Book(run, self.state, self.timeline)
        self.nothing_left: NothingLeft | None = None  # set when the run ends before its last step
        self.first_step_s: float | None = None  # where all steps were trained before, there is none
        self.stats: Callable[[], list[StageStats]] = list  # of the pipeline, once there is one

    async def run(self) -> dict[str, Any]:
        """Starts everything at once, trains, and returns the summary."""
        config = self.config
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(workspace())
            process = config.placement.learner(LearnerProcessConfig(module="algo.learner"))
            learner = LearnerProcess(process, folder, self.run_folder.path / "learner.log")
            self.learner = await stack.enter_async_context(learner)
            box = await stack.enter_async_context(Sandbox(config.jail))
            chat = Chat.load(config.checkpoint)
            self._check_budget(chat)
            self.canary = [chat.prompt_ids(prompt.messages)[: config.max_tokens] for prompt in self.held_out[:4]]
            balancer = KvAware(config.max_tokens, moves=0)  # a request that moves goes on under another seed
            allowed = tolerance_of(config.checkpoint, config.replica.dtype)
            several = FleetConfig(replicas=config.replicas, canary_tolerance=allowed)
            parts = several, partial(Replica, config.replica), balancer
            self.fleet = await stack.enter_async_context(Fleet(*parts, self.timeline, self.canary))
            tools = [PythonTool(box)]
            self.rollouts = Rollouts(config.budget, chat, self.fleet, tools, self.timeline, config.seed)
            parts = self.held_out, config.eval_samples, self.rollouts, self.reward, avg_at_k, self.timeline
            self.evaluation = Evaluation(*parts)
            self.evaluator = await self._beside(stack, chat, tools, folder) if config.eval_replicas else None
            shown = f"rocstar {self.run_folder.path}", config.steps, self.fleet, config.kv_blocks - 1, self.console
            self.display = stack.enter_context(Display(*shown))
            self.book.restore(self.display)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(tasks.create_task(self.display.tick(), name="display").cancel)
            await self._first_weights(str(folder))
            # A full collection walks the million objects that vLLM and torch brought along: the loop stood for 0.3 s.
            gc.freeze()
            step = self.fleet.version  # a run may have ended before an evaluation beside it did
            if not self.book.progress.has_evaluated(step) and (found := await self._evaluate_if_due(step)):
                self.book.step(step, found)
            await self._train()
            if self.nothing_left:
                await self._evaluate_early_end()
            if self.evaluator:
                self.display.phase("waiting for the last evaluation")
                await self.evaluator.drain()
            self.display.phase("saving the checkpoint")
            await self.learner.save(self.run_folder.path / "checkpoint")
            return self._summary()

    async def _train(self) -> None:
        config, journal = self.config, self.state.journal
        problems = journal.after(prompts("train", config.seed))
        select = select_and_score(config.selector, config.seed)
        grouped = groups(self.rollouts, self.reward, select, problems, config.group, self.timeline, journal)
        learn = Learn(
            learner=self.learner,
            fleet=self.fleet,
            leases=self.leases,
            join=make_batch,
            stepped=self._stepped,
            stats=lambda: self.stats(),
            timeline=self.timeline,
            state=self.state,
            checkpoint_every=config.checkpoint_every,
            train_s=self.book.progress.train_s,
            rests=config.placement.rests,
        )
        pipeline = Pipeline(
            [
                Stage(name="admit", run=stages.admit(problems, self.leases, config.steps, journal)),
                Stage(name="groups", run=grouped, workers=config.prompts_per_step),
                Stage(name="batch", run=stages.batch(self.leases)),
                Stage(name="learn", run=learn),
            ]
        )
        self.stats = pipeline.stats
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch(lambda: self.rollouts.tokens_sampled, self.stats), name="watch")
            await pipeline.run()
            watching.cancel()
        self.nothing_left = learn.nothing_left

    def _check_budget(self, chat: Chat) -> None:
        shortest, budget = (
            min(len(chat.prompt_ids(prompt.messages)) for prompt in self.held_out),
            self.config.max_tokens,
        )
        if shortest >= budget:
            cause = f"max_tokens={budget} leaves no token for an answer: the shortest of {len(self.held_out)} held-out"
            raise BudgetTooSmall(f"{cause} prompts has {shortest} tokens. Fix: a larger max_tokens")

    async def _stepped(self, step: int, metrics: dict[str, float]) -> None:
        """The weights of a step are live: evaluates them when it is time, and writes the step's numbers down."""
        self.first_step_s = self.first_step_s or time.perf_counter() - STARTED
        self.book.step(step, metrics | await self._evaluate_if_due(step))

    async def _evaluate_if_due(self, step: int) -> dict[str, float]:
        return await self._evaluate(step) if self._is_due(step) else {}

    def _is_due(self, step: int) -> bool:
        return step % self.config.eval_every == 0 or step == self.config.steps

    async def _evaluate_early_end(self) -> None:
        """The last weights, which are not those of the last step that was planned."""
        step = self.fleet.version
        if not self._is_due(step) and (found := await self._evaluate(step)):
            self.book.step(step, {**found, "time/train_total_s": self.book.progress.train_s})

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Metrics of the version that is live; none yet where evaluations run beside training."""
        if self.evaluator:
            assert self.fleet.weights is not None
            self.evaluator.submit(step, self.fleet.weights)
            return {}
        self.display.phase(f"evaluating on {len(self.held_out)} held-out problems")
        metrics, trajectories = await self.evaluation.run(step)
        self.book.evaluated(step, metrics, trajectories)
        self.display.phase("training")
        return metrics

    async def _beside(self, stack: AsyncExitStack, chat: Chat, tools: list[PythonTool], folder: Path) -> Evaluator:
        """Evaluations on replicas of their own, on any core. Their timeline is not written."""
        config, timeline = self.config, Timeline()

        def make(index: int, core: int | None, on_step: Callable[[int, KvSample], None]) -> Replica:
            return Replica(config.replica, index, None, on_step)

        balancer = KvAware(config.max_tokens, moves=0)
        fleet = Fleet(FleetConfig(replicas=config.eval_replicas), make, balancer, timeline, self.canary)
        await stack.enter_async_context(fleet)
        rollouts = Rollouts(config.budget, chat, fleet, tools, timeline, config.seed)
        evaluation = Evaluation(self.held_out, config.eval_samples, rollouts, self.reward, avg_at_k, timeline)
        return await stack.enter_async_context(Evaluator(evaluation, fleet, self.book.beside, folder))

    async def _first_weights(self, folder: str) -> None:
        """The learner's weights go to the replicas before anything is sampled: they agree from the start."""
        message = Configure(
            checkpoint=str(self.config.checkpoint.resolve()),
            learner=dataclasses.asdict(self.config.learner),
            canary=self.canary,
            weights_dir=folder,
            seed=self.config.seed,
            resume=self.state.checkpoint,
        )
        async with self.fleet.rest():  # the learner may need their devices
            ready, logprobs = await self.learner.configure(message)
        await self.fleet.update_weights(Weights(ready.weights, ready.version, logprobs))

    def _summary(self) -> dict[str, Any]:
        return {
            **self.book.summary(),
            "ended": str(self.nothing_left or "all steps are trained"),
            "first_step_s": self.first_step_s,
            "total_wall_s": time.perf_counter() - STARTED,
            "evaluations_dropped": self.book.progress.missed(self.config.eval_every),
            "canary_max_abs": self.fleet.canary_max_abs,
            "replica_deaths": self.fleet.deaths,
            "preemptions": self.fleet.preemptions,
            "loop_lag_p99_ms": float(np.percentile(self.display.lags_s or [0.0], 99)) * 1e3,
            "versions": versions(),
        }


async def train(config: Config, run: RunFolder, console: Console) -> None:
    """Trains and writes the run's files; the timeline and the plot are written also when the run is interrupted."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    end_on_signals(task)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    job = Quickstart(config, run, console)
    loop.add_signal_handler(signal.SIGUSR1, lambda: dump(job.stats))
    if run.resumed:
        say(job.book.story)
        run.extend(config.steps)
    else:
        if run.unfinished:
            say(another(run.unfinished, run.path, config))
        say(f"a new run of {config.steps} steps in {run.path}")
        run.json("config.json", {**dataclasses.asdict(config), "argv": sys.argv, "versions": versions()})
    engines = config.replicas + config.eval_replicas
    say(f"starting the learner, the sandbox and {engines} vLLM engines, which takes some seconds")
    with job.book.closing(config.algorithm):
        summary = await job.run()
    run.json("summary.json", summary)  # the last file: what has it is not resumed
    print_report(console, run.path, summary, job.book.progress)
    if job.nothing_left:
        say(str(job.nothing_left))


def another(unfinished: Unfinished, path: Path, config: Config) -> str:
    """Why a new run begins although one of its name did not end, and how to go on with that one."""
    changed = ", ".join(f"{name} ({there} there, {now} now)" for name, (there, now) in unfinished.differences.items())
    old = command({**unfinished.config, "runs": config.runs})
    return f"{unfinished.path} did not end and differs in {changed}; a new run begins in {path}. To go on there: {old}"


def command(values: Mapping[str, Any]) -> str:
    """With which a run of this configuration is begun, or gone on with."""
    words = overrides(Config, {name: value for name, value in values.items() if name != "fresh"})
    return shlex.join([sys.executable, sys.argv[0], *words])


def interrupted(run: RunFolder | None, config: Config) -> str:
    if run is None or not run.path.exists():
        return "interrupted before anything was measured; nothing is kept"
    return f"interrupted; what was measured is in {run.path}. To go on: {command(dataclasses.asdict(config))}"


def main(argv: Sequence[str]) -> int:
    config = parse(Config, argv)
    apart = ("fresh", "runs", "steps")
    same = {name: value for name, value in dataclasses.asdict(config).items() if name not in apart}
    console, run = Console(), None
    try:
        with (
            RunFolder.open(config.runs, config.name, None if config.fresh else same, steps=config.steps) as run,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            streams.listen(run.note)
            runner.run(train(config, run, console))
    except EXPECTED as error:  # all else is a bug, perhaps in a stage or a reward of yours, and keeps its traceback
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"quickstart: {interrupted(run, config)}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
