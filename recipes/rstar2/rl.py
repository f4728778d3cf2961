"""Trains rStar2-Agent by GRPO-RoC in the stages of its report: 8 K tokens, 12 K, then 12 K on what is not solved yet.

    python recipes/rstar2/rl.py stage=1 model=models/rstar2-sft data=data/rstar2/train.parquet
    python recipes/rstar2/rl.py stage=all model=models/rstar2-sft data=train.parquet eval_sets=aime24.parquet

Each stage is a run in a folder of its own, runs/NAME/stage-1 and so on, and begins with the weights of the one before.
`stage=all` runs them one after the other, and between the last two the filter of `filter.py`. The same command goes on
wherever it was interrupted. `protocol=release` takes the values of the published code, which has one stage.
`--help` lists all options; what is not given is as in `REPORT` or `RELEASE` below.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import msgspec
from rich.console import Console

from algo.eval_stats import avg_at_k
from algo.group.batch import make_batch, select_and_score
from algo.group.roc import RoC
from algo.group.selection import KeepAll
from algo.learner.config import LearnerConfig
from algo.learner.serialize import to_plain
from algo.loss.policy_losses import Correction, PpoClip
from algo.reward.math_reward import MathReward
from engine.assembly.config import TrainingConfig
from engine.assembly.devices import DevicePlan
from engine.assembly.training import training
from engine.balancing.kv_aware import KvAware
from engine.console.notes import say
from engine.console.options import flat, parse_all
from engine.errors import BadInput
from engine.nodes.config import LeadConfig
from engine.nodes.door import ListenFailed
from engine.process import streams
from engine.programs.begin import begin
from engine.programs.invocation import Machines
from engine.programs.job import run as run_job
from engine.programs.machines import commands, lead_of
from engine.programs.main import written
from engine.programs.roles import lead_training
from engine.recipe import Recipe, Run
from engine.recording.policy import RecordConfig
from engine.rollout.rollout import RolloutConfig
from engine.run.checkpoints import CheckpointFolder
from engine.run.identity import Identity
from engine.run.run_folder import RunFolder
from engine.stages.group import GroupConfig
from engine.telemetry.watchdog import exit_process
from engine.types import Prompt
from recipes.rstar2 import filter as offline
from recipes.rstar2.parts.sampling.options import (
    ReplicaOptions,
    SandboxOptions,
    check_exists,
    check_positions,
    named_sets,
    open_data,
)
from recipes.rstar2.parts.sampling.problems import fingerprint, open_output, sha256
from recipes.rstar2.parts.sampling.protocol import DEADLINE_S, PROTOCOLS, ProtocolName


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of training. Budgets are of a rollout."""

    response_tokens: int
    """Sampled and tool tokens."""
    turns: int
    """T."""
    steps: int
    new_optimizer: bool = True
    """False: moments and batches counted so far are those at the end of the stage before."""
    unsolved_only: bool = False
    """Only problems that the stage before does not solve in all of `Values.filter_samples` samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """What a run is made of. The prompt's chat, the tool and its limits are in parts/sampling/protocol.py."""

    stages: tuple[Stage, ...]
    prompts_per_step: int
    oversample: int = 2
    """Rollouts for each trained one: 2G are rolled out, G are kept by RoC."""
    group_size: int = 16
    """G."""
    filter_samples: int = 8
    eval_every: int = 5
    learner: LearnerConfig


# What the report says (arXiv 2508.20722). Not in it: weight decay, gradient clipping, minibatches (one, as in the
# release) and how often it evaluates.
REPORT = Values(
    stages=(
        Stage(response_tokens=8 * 1024, turns=10, steps=300),
        Stage(response_tokens=12 * 1024, turns=10, steps=85, new_optimizer=False),
        Stage(response_tokens=12 * 1024, turns=15, steps=125, unsolved_only=True),
    ),
    prompts_per_step=512,
    learner=LearnerConfig(
        lr=1e-6,
        warmup_steps=20,
        schedule="constant",
        minibatches=1,
        weight_decay=0.0,
        grad_clip=1.0,
        reference_kl_coef=0.0,
        loss=PpoClip(clip_low=0.2, clip_high=0.28, dual_clip=None, aggregate="token"),
    ),
)
# What its published script says, and verl's defaults where it is silent.
RELEASE = Values(
    stages=(Stage(response_tokens=8 * 1024, turns=5, steps=200),),
    prompts_per_step=128,
    learner=replace(
        REPORT.learner,
        weight_decay=0.01,
        loss=PpoClip(clip_low=0.2, clip_high=0.28, dual_clip=3.0, aggregate="token"),
    ),
)
VALUES: dict[str, Values] = {"report": REPORT, "release": RELEASE, "none": REPORT}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plateau:
    """When the share of truncated rollouts has stopped to change: the rule by which the report ends its first stage.

    >>> Plateau(window=2, level=0.05, change=0.01).reached([0.0, 0.0, 0.2, 0.1, 0.1, 0.104])
    False
    >>> Plateau(window=2, level=0.05, change=0.01).reached([0.0, 0.0, 0.1, 0.1, 0.1, 0.104])
    True
    """

    window: Annotated[int, "steps whose mean is compared with the mean of as many before"] = 20
    level: Annotated[float, "least mean share of truncated rollouts; below it there is room"] = 0.05
    change: Annotated[float, "largest difference of the two means"] = 0.01

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        for name in ("level", "change"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")

    def reached(self, shares: Sequence[float]) -> bool:
        """shares: of the steps so far, in order."""
        if len(shares) < 2 * self.window:
            return False
        before, now = fmean(shares[-2 * self.window : -self.window]), fmean(shares[-self.window :])
        return now >= self.level and abs(now - before) <= self.change

    def enough(self, steps: Sequence[Mapping[str, float]]) -> str | None:
        """For `Training.train`: why the stage ends after these steps, if it does. steps: rows of metrics.jsonl."""
        if not self.reached([row["stop/length"] / max(1.0, row["rollout/trajectories"]) for row in steps]):
            return None
        return f"after step {steps[-1]['step']:.0f} the share of truncated rollouts is on a plateau"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutOptions:
    max_tokens: Annotated[int | None, "of prompt and response together; none: the stage's"] = None
    max_turns: Annotated[int | None, "T; none: the stage's"] = None
    deadline_s: Annotated[float, "wall time of a rollout"] = DEADLINE_S


@dataclass(frozen=True, kw_only=True)
class Config:
    stage: Annotated[Literal["1", "2", "3", "all"], "which stage; all: one after the other"] = "1"
    protocol: Annotated[ProtocolName, "whose values; none: the report's, with the model's own chat template"] = "report"
    model: Annotated[Path, "Hugging Face folder that stage 1 begins with, or one without a stage before it"] = Path(
        "models/rstar2-sft"
    )
    data: Annotated[Path, "JSONL, parquet or a datasets folder: what is trained on"] = Path("data/rstar2/train.parquet")
    runs: Annotated[Path, "where runs are written"] = Path("runs")
    name: Annotated[str, "folder of the stages under runs/"] = "rstar2"
    steps: Annotated[tuple[int, ...], "of each stage that runs; none: the protocol's"] = ()
    switch: Annotated[Literal["steps", "plateau"], "plateau: a stage before the last may end earlier"] = "steps"
    algorithm: Annotated[Literal["roc", "grpo"], "grpo: as many rollouts as are trained, for comparison"] = "roc"
    stateful: Annotated[bool, "calls of a rollout share their variables"] = False
    prompts_per_step: Annotated[int | None, "groups per step; none: the protocol's"] = None
    group_size: Annotated[int | None, "trajectories trained per group (G); none: the protocol's"] = None
    filter_samples: Annotated[int | None, "of each problem between stages 2 and 3; none: the protocol's"] = None
    eval_sets: Annotated[tuple[Path, ...], "sets to evaluate on while it trains, named by their files"] = ()
    eval_every: Annotated[int | None, "steps between evaluations; none: the protocol's"] = None
    eval_problems: Annotated[int | None, "the first so many of each set; none: all"] = None
    eval_samples: Annotated[int | None, "of each problem; none: the protocol's"] = None
    eval_temperature: Annotated[float | None, "none: the protocol's"] = None
    eval_max_tokens: Annotated[int | None, "of prompt and response together; none: the protocol's"] = None
    eval_turns: Annotated[int | None, "none: the protocol's"] = None
    eval_replicas: Annotated[int, "engines that evaluate beside training; 0: the replicas do, between steps"] = 0
    step_deadline_s: Annotated[float, "in which the learner must have trained a step"] = 2 * 3600.0
    start_deadline_s: Annotated[float | None, "in which replicas and learner must be up; none: 300 and 600"] = None
    canary_tolerance: Annotated[
        float | Literal["auto"] | None, "mean difference of replicas' and learner's log-probabilities; none: not judged"
    ] = "auto"
    max_staleness: Annotated[int, "versions that a trained token may be old; 0 is strictly on-policy"] = 0
    checkpoint_every: Annotated[int, "steps between checkpoints; the journal has what follows"] = 5
    write_every: Annotated[int, "steps between those whose rollouts are written for people to read"] = 10
    replicas: Annotated[int, "vLLM engines"] = 2
    devices: Annotated[tuple[int, ...], "GPUs, the learner's first, or all by turns; none: the CPU"] = ()
    tensor_parallel: Annotated[int, "GPUs of a replica"] = 1
    learner_ranks: Annotated[int, "FSDP ranks"] = 1
    adapters: Annotated[bool, "with lora_rank: replicas get the adapters alone, versions side by side"] = False
    seed: Annotated[int, "of the run: prompts, sampling, selection, training order"] = 0
    rollout: RolloutOptions = RolloutOptions()
    plateau: Plateau = Plateau()
    replica: ReplicaOptions = ReplicaOptions()  # noqa: RUF009  frozen
    sandbox: SandboxOptions = SandboxOptions()  # noqa: RUF009  frozen
    learner: LearnerConfig = REPORT.learner
    record: RecordConfig = RecordConfig()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        if self.name in ("", "..") or Path(self.name).name != self.name:
            raise ValueError(f"name must be that of a folder, got {self.name!r}")
        for name in ("prompts_per_step", "filter_samples", "eval_every", "eval_problems", "eval_samples", "eval_turns"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.g < 2:
            raise ValueError(f"group_size must be at least 2, got {self.g}")
        if self.eval_replicas < 0 or (self.eval_replicas and self.devices):
            raise ValueError(f"eval_replicas must be at least 0, and 0 on GPUs, got {self.eval_replicas}")
        if max(self.numbers) > len(self.values.stages):
            raise ValueError(f"stage must be 1 or all for protocol={self.protocol}, got {self.stage}")
        if len(self.steps) not in (0, len(self.numbers)):
            raise ValueError(
                f"steps must be {len(self.numbers)} numbers for stage={self.stage}, one for each stage, "
                f"got {','.join(map(str, self.steps))}"
            )
        for number in self.numbers:
            check_positions(self.model, self.rollout_of(number).max_tokens, "rollout.max_tokens")
            if self.eval_sets:
                check_positions(self.model, self.evaluated.max_tokens, "eval_max_tokens")
            self.training(number, self.model)  # the parts' own checks, before anything starts

    @property
    def values(self) -> Values:
        return VALUES[self.protocol]

    @property
    def numbers(self) -> list[int]:
        """Of the stages that run."""
        return [*range(1, len(self.values.stages) + 1)] if self.stage == "all" else [int(self.stage)]

    @property
    def g(self) -> int:
        return self.group_size or self.values.group_size

    @property
    def folder(self) -> Path:
        return self.runs / self.name

    def stage_of(self, number: int) -> Stage:
        """With the steps that are given."""
        stage = self.values.stages[number - 1]
        return replace(stage, steps=self.steps[self.numbers.index(number)]) if self.steps else stage

    def seed_of(self, number: int) -> int:
        """Each stage has other prompts and samples."""
        return 10 * self.seed + number

    def rollout_of(self, number: int) -> RolloutConfig:
        stage = self.values.stages[number - 1]
        return PROTOCOLS[self.protocol].budget(
            response_tokens=stage.response_tokens,
            turns=self.rollout.max_turns or stage.turns,
            max_tokens=self.rollout.max_tokens,
            deadline_s=self.rollout.deadline_s,
        )

    @property
    def evaluated(self) -> RolloutConfig:
        """The budget of the evaluations."""
        return PROTOCOLS[self.protocol].eval_budget(
            turns=self.eval_turns,
            temperature=self.eval_temperature,
            max_tokens=self.eval_max_tokens,
            deadline_s=self.rollout.deadline_s,
        )

    def longest(self, number: int) -> int:
        """Tokens of the longest trajectory of a stage, or of its evaluations."""
        evaluated = self.evaluated.max_tokens if self.eval_sets else 0
        return max(self.rollout_of(number).max_tokens, evaluated)

    @property
    def learning(self) -> LearnerConfig:
        """With what follows from the dtype of replicas on the CPU."""
        learner = self.learner
        if self.replica.dtype == "bfloat16" and not self.devices:
            learner = replace(learner, weights_dtype="bfloat16")
        if self.replica.quantization is not None:  # the sampler is another model than the one that learns
            correction = to_plain(Correction(level="token", upper=2.0))
            learner = replace(learner, loss={**learner.loss, "proximal": True, "correction": correction})
        return learner

    def training(self, number: int, checkpoint: Path, learner_state: Path | None = None) -> TrainingConfig:
        """Raises ValueError."""
        values = self.values
        steps = self.stage_of(number).steps
        oversample = values.oversample if self.algorithm == "roc" else 1
        return TrainingConfig(
            checkpoint=checkpoint,
            learner_state=learner_state,
            steps=steps,
            prompts_per_step=self.prompts_per_step or values.prompts_per_step,
            group=GroupConfig(samples=oversample * self.g),
            rollout=self.rollout_of(number),
            learner=self.learning.for_run(steps),
            replica=self.replica.config(checkpoint, self.longest(number), self.devices),
            devices=DevicePlan(
                devices=self.devices,
                learner_ranks=self.learner_ranks,
                replicas=self.replicas,
                tensor_parallel=self.tensor_parallel,
                max_staleness=self.max_staleness,
                adapters=self.adapters,
            ),
            chat=PROTOCOLS[self.protocol].chat(),
            sandbox=self.sandbox.config(),
            seed=self.seed_of(number),
            max_staleness=self.max_staleness,
            canary_tolerance=self.canary_tolerance,
            step_deadline_s=self.step_deadline_s,
            start_deadline_s=self.start_deadline_s,
            checkpoint_every=self.checkpoint_every,
            title=f"{'GRPO-RoC' if self.algorithm == 'roc' else 'GRPO'}, stage {number}",
            record=self.record,
        )


@dataclass(frozen=True, kw_only=True)
class ReleaseConfig(Config):
    """The same options with the release's defaults."""

    protocol: Annotated[ProtocolName, "whose values; none: the report's, with the model's own chat template"] = (
        "release"
    )
    learner: LearnerConfig = RELEASE.learner


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a stage begins with."""

    checkpoint: Path
    learner_state: Path | None = None


async def run_stages(config: Config, lead: LeadConfig | None = None) -> None:
    """Runs the stages that are asked for, each from where it is. Raises BadInput, or one of `training.EXPECTED`."""
    console = Console()
    check_files(config)
    data = config.data
    for number in config.numbers:
        if config.stage == "all" and config.stage_of(number).unsolved_only:
            data = await filter_unsolved(config, number, console)
        await run_stage(config, number, data, console, lead)


def check_files(config: Config) -> None:
    """Raises BadInput for data that are not there. A rollout node needs none: its prompts come from the lead."""
    try:
        check_exists(data=config.data)
        for path in config.eval_sets:
            check_exists(eval_sets=path)
    except ValueError as error:
        raise BadInput(str(error)) from None


async def run_stage(config: Config, number: int, data: Path, console: Console, lead: LeadConfig | None) -> None:
    """One stage, in a folder of its own; nothing where it has ended already."""
    name, steps = f"stage-{number}", config.stage_of(number).steps
    path = config.folder / name
    start = start_of(config, number, console)
    identity = identity_of(config, number, start, data)
    check_same(path, identity)
    if has_ended(path, steps):
        say(console, f"stage {number} has ended: {path}")
        return
    prompts = open_data(data, seed=config.seed_of(number), epochs=None)
    sets = named_sets(config.eval_sets, config.eval_problems)
    with RunFolder.open(config.folder, name, Identity(identity), steps=steps) as folder:
        if folder.path != path:
            raise BadInput(f"{path} is written by another process. Fix: wait for it, or give another name=")
        streams.listen(folder.note)
        run = Run(folder=folder)
        if lead is not None:
            alone = tuple(f"stage={number}" if word == "stage=all" else word for word in lead.options)
            run = Run(folder=folder, opens=partial(lead_training, replace(lead, options=alone)))
        if not folder.resumed:
            say(console, f"stage {number}: a new run of {steps} steps in {path}")
            one = replace(config, stage=str(number), steps=(steps,), model=start.checkpoint)
            folder.json("config.json", {**flat(one), **identity, "steps": steps, **written(recipe, one)})
        await train_stage(config, number, start, prompts, sets, run)


async def train(config: Config, run: Run) -> dict[str, Any]:
    """A stage without its data: on a rollout node, to which the lead gives prompts, and in a replay."""
    return await train_stage(config, config.numbers[0], Start(checkpoint=config.model), iter(()), {}, run)


async def train_stage(
    config: Config,
    number: int,
    start: Start,
    prompts: Iterator[Prompt],
    sets: Mapping[str, Sequence[Prompt]],
    run: Run,
) -> dict[str, Any]:
    """The stage itself. sets: to evaluate on, by name. Returns its summary."""
    settings = config.training(number, start.checkpoint, start.learner_state)
    make_balancer = partial(KvAware, config.longest(number), moves=0)
    selector = RoC(keep=config.g) if config.algorithm == "roc" else KeepAll()
    async with training(settings, run, make_balancer=make_balancer) as job:
        rollouts = job.rollouts([PROTOCOLS[config.protocol].tool(job.sandbox, stateful=config.stateful)])
        reward = MathReward(runner=job.sandbox)
        evaluations = []
        if sets:
            evaluation = await job.evaluation(
                [prompt for held_out in sets.values() for prompt in held_out],
                reward,
                rollouts=rollouts.with_config(config.evaluated),
                estimate=avg_at_k,
                every=config.eval_every or config.values.eval_every,
                samples=config.eval_samples or PROTOCOLS[config.protocol].eval_samples,
                replicas=config.eval_replicas,
            )
            evaluations.append(evaluation)
        return await job.run(
            [
                job.admit(prompts),
                job.group(rollouts, reward, select_and_score(selector, settings.seed)),
                job.batch(),
                job.write_rollouts(every=config.write_every),
                job.train(make_batch, evaluations=evaluations, enough=enough_of(config, number)),
            ]
        )


def enough_of(config: Config, number: int) -> Callable[[Sequence[Mapping[str, float]]], str | None]:
    """The rule that ends a stage before its steps are over, if there is one: the last stage has none."""
    if config.switch == "steps" or number == len(config.values.stages):
        return lambda steps: None
    return config.plateau.enough


def start_of(config: Config, number: int, console: Console) -> Start:
    """Raises BadInput where the stage before has not ended."""
    before = config.folder / f"stage-{number - 1}"
    if number == 1 or not before.exists():
        if number > 1:
            say(console, f"no {before}: stage {number} begins with {config.model} and a new optimizer")
        return Start(checkpoint=config.model)
    if not has_ended(before):
        raise BadInput(
            f"{before} has not ended. Fix: run stage={number - 1} first, or give another name= and model= to begin with"
        )
    start = Start(checkpoint=before / "checkpoint")
    if config.stage_of(number).new_optimizer:
        return start
    states = CheckpointFolder(before / "checkpoints")
    if not states.steps():
        say(console, f"{states.path} holds no state: stage {number} begins with a new optimizer")
        return start
    return replace(start, learner_state=states.of(states.steps()[-1]))


async def filter_unsolved(config: Config, number: int, console: Console) -> Path:
    """The data without what the policy before this stage solves each time; made by a job that goes on where it was."""
    settings = filter_config(config, number)
    if (settings.output / "filter.json").exists():  # complete; made again it might hold what failed then
        open_output(settings.output, settings.identity())
        return settings.output / "filtered.jsonl"
    return await offline.filter_data(settings, console)


def filter_config(config: Config, number: int) -> offline.Config:
    """Of the job before a stage: the budgets of the stage before, and on GPUs all of them, since no learner runs."""
    replicas = len(config.devices) // config.tensor_parallel if config.devices else config.replicas
    return offline.Config(
        model=config.folder / f"stage-{number - 1}" / "checkpoint",
        data=config.data,
        output=config.folder / "filter",
        keep="unsolved",
        n=config.filter_samples or config.values.filter_samples,
        protocol=config.protocol,
        stateful=config.stateful,
        max_tokens=config.rollout.max_tokens,
        response_tokens=config.values.stages[number - 2].response_tokens,
        turns=config.rollout_of(number - 1).max_turns,
        deadline_s=config.rollout.deadline_s,
        replicas=replicas,
        devices=config.devices[: replicas * config.tensor_parallel],
        tensor_parallel=config.tensor_parallel,
        seed=config.seed,
        replica=config.replica,
        sandbox=config.sandbox,
    )


# What a run that goes on may have otherwise: where it is computed, how often it is written down, what fits into memory.
_FREE = {
    *("step_deadline_s", "start_deadline_s", "canary_tolerance", "learner.mismatch_tolerance"),
    *("stage", "steps", "runs", "name", "model", "data", "checkpoint_every", "write_every"),
    *("replicas", "devices", "tensor_parallel", "learner_ranks", "sandbox.slots"),
    *("replica.kv_blocks", "replica.max_num_seqs", "learner.micro_batch_tokens", "learner.threads"),
    *("learner.activation_checkpointing", "learner.offload_optimizer"),
    *(f"record.{field.name}" for field in fields(RecordConfig)),
}


def identity_of(config: Config, number: int, start: Start, data: Path) -> dict[str, Any]:
    """What a stage's folder is of. Model and data count by what they hold."""
    given = {name: value for name, value in flat(config).items() if name not in _FREE}
    return {**given, "stage": str(number), "weights": fingerprint(start.checkpoint), "data_sha256": sha256(data)}


def check_same(path: Path, identity: Mapping[str, Any]) -> None:
    """Raises BadInput where the folder holds a run of other values: results are never mixed."""
    there = _read(path / "config.json")
    wanted = msgspec.json.decode(msgspec.json.encode(identity, enc_hook=str))
    names = [name for name, value in wanted.items() if there is not None and there.get(name) != value]
    if there is not None and names:
        changed = ", ".join(f"{name} ({there.get(name)} there, {wanted[name]} now)" for name in names)
        raise BadInput(f"{path} holds a run that differs in {changed}. Fix: give another name=")


def has_ended(path: Path, steps: int = 0) -> bool:
    """Whether the run there has ended, with so many steps or more planned."""
    there = _read(path / "config.json")
    return (path / "summary.json").exists() and there is not None and there["steps"] >= steps


def _read(path: Path) -> dict[str, Any] | None:
    """None where there is none. Raises BadInput for a damaged one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise BadInput(f"{path} is damaged: {error}. Fix: give another name=") from error


def main(argv: Sequence[str]) -> int:
    begin()
    config, machines = parse_all([Config, Machines], argv, description=__doc__)
    if config.protocol == "release":  # with its own defaults
        config, machines = parse_all([ReleaseConfig, Machines], argv)
    lead = lead_of(machines, recipe, config)
    if machines.dry_run:
        here = shlex.join([sys.executable, *sys.argv[:1], *(word for word in argv if not word.startswith("dry_run="))])
        print("\n".join(commands(here, lead)))
        return 0
    return run_job("rl", run_stages(config, lead), expected=(ListenFailed,))


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
