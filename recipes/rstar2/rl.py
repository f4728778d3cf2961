"""Trains rStar2-Agent by GRPO-RoC in the stages of its report: 8 K tokens, 12 K, then 12 K on what is not solved yet.

    python recipes/rstar2/rl.py stage=1 model=models/rstar2-sft data=data/rstar2/train.parquet
    python recipes/rstar2/rl.py stage=all model=models/rstar2-sft data=train.parquet eval_sets=aime24.parquet

Each stage is a run in a folder of its own, runs/NAME/stage-1 and so on, and begins with the weights of the one before.
`stage=all` runs them one after the other, and between the last two the filter of `filter.py`. The same command resumes
them. `protocol=release` takes the values of the published code, which has one stage. What is not
given is as in `REPORT` or `RELEASE` of parts/stages/values.py.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console

from algo.eval_stats import avg_at_k
from algo.group.batch import make_batch, select_and_score
from algo.group.roc import RoC
from algo.group.selection import KeepAll
from algo.learner.config import LearnerConfig
from algo.reward.math_reward import MathReward
from engine.assembly.config import TrainingConfig
from engine.assembly.training import training
from engine.balancing.kv_aware import KvAware
from engine.console.notes import say
from engine.console.options import flat, parse_all
from engine.errors import BadInput
from engine.programs.begin import begin
from engine.programs.invocation import Invocation, Machines
from engine.programs.job import run as run_job
from engine.programs.machines import commands, lead_of
from engine.programs.main import FREE, run_in
from engine.recipe import Recipe, Run
from engine.rollout.rollout import RolloutConfig
from engine.run.identity import Identity
from engine.stages.group import GroupConfig
from engine.telemetry.watchdog import exit_process
from recipes.options import RunOptions
from recipes.rstar2 import filter as offline
from recipes.rstar2.parts.sampling.options import (
    ReplicaOptions,
    SandboxOptions,
    check_exists,
    check_positions,
    named_sets,
    open_data,
)
from recipes.rstar2.parts.sampling.output import fingerprint, open_output, sha256
from recipes.rstar2.parts.sampling.protocol import DEADLINE_S, PROTOCOLS, ProtocolName
from recipes.rstar2.parts.stages.chain import (
    check_same,
    folder_of,
    has_ended,
    open_stage,
    optimizer_before,
    weights_before,
)
from recipes.rstar2.parts.stages.plateau import Plateau
from recipes.rstar2.parts.stages.values import RELEASE, REPORT, VALUES, Stage, Values
from sandbox.printable import printable
from sandbox.require import at_least, none_or, require, require_fields

StageName = Literal["1", "2", "3", "all"]
STAGES: Sequence[StageName] = ("1", "2", "3")
# Options that may change when a stage goes on: where it is computed, how often it is written down, and what fits into
# memory. Model and data are compared by their content.
FREE_OF_A_STAGE = {
    *FREE,
    *("model", "data", "checkpoint_every"),
    *("replicas", "devices", "tensor_parallel", "learner_ranks", "sandbox.slots"),
    *("replica.kv_blocks", "replica.max_num_seqs", "learner.micro_batch_tokens", "learner.threads"),
    *("learner.activation_checkpointing", "learner.activation_offload", "learner.offload_optimizer"),
    "learner.flash_attention",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutOptions:
    max_tokens: Annotated[int | None, "tokens of prompt and response together; none: the stage's"] = None
    max_turns: Annotated[int | None, "turns (T); none: the stage's"] = None
    deadline_s: Annotated[float, "wall time of a rollout"] = DEADLINE_S


@dataclass(frozen=True, kw_only=True)
class Config(RunOptions):
    stage: Annotated[StageName, "which stage; all: one after the other"] = "1"
    protocol: Annotated[ProtocolName, "whose values; none: the report's, with the model's own chat template"] = "report"
    model: Annotated[Path, "Hugging Face folder that stage 1 begins with, or one without a stage before it"] = Path(
        "models/rstar2-sft"
    )
    data: Annotated[Path, "JSONL, parquet or a datasets folder: what is trained on"] = Path("data/rstar2/train.parquet")
    steps: Annotated[tuple[int, ...], "optimizer steps of each stage that runs; none: the protocol's"] = ()
    switch: Annotated[Literal["steps", "plateau"], "plateau: a stage before the last may end earlier"] = "steps"
    algorithm: Annotated[Literal["roc", "grpo"], "grpo: as many rollouts as are trained, for comparison"] = "roc"
    stateful: Annotated[bool, "calls of a rollout share their variables"] = False
    prompts_per_step: Annotated[int | None, "groups per step; none: the protocol's"] = None
    group_size: Annotated[int | None, "trajectories trained per group (G); none: the protocol's"] = None
    filter_samples: Annotated[int | None, "samples of each problem between stages 2 and 3; none: the protocol's"] = None
    eval_sets: Annotated[tuple[Path, ...], "sets to evaluate on while it trains, named by their files"] = ()
    eval_every: Annotated[int | None, "steps between evaluations; none: the protocol's"] = None
    eval_problems: Annotated[int | None, "problems of each set, the first ones; none: all"] = None
    eval_samples: Annotated[int | None, "samples of each held-out problem; none: the protocol's"] = None
    eval_temperature: Annotated[float | None, "sampling temperature of evaluations; none: the protocol's"] = None
    eval_max_tokens: Annotated[int | None, "tokens of prompt and response together; none: the protocol's"] = None
    eval_turns: Annotated[int | None, "turns of a held-out rollout; none: the protocol's"] = None
    eval_replicas: Annotated[int, "engines that evaluate beside training; 0: the replicas do, between steps"] = 0
    checkpoint_every: int = 5
    step_deadline_s: float = 2 * 3600.0
    rollout: RolloutOptions = RolloutOptions()
    plateau: Plateau = Plateau()  # noqa: RUF009  frozen
    replica: ReplicaOptions = ReplicaOptions()  # noqa: RUF009  frozen
    sandbox: SandboxOptions = SandboxOptions()  # noqa: RUF009  frozen
    learner: LearnerConfig = REPORT.learner

    def __post_init__(self) -> None:
        require_fields(
            self,
            none_or(at_least(1)),
            "prompts_per_step",
            "filter_samples",
            "eval_every",
            "eval_problems",
            "eval_samples",
            "eval_turns",
        )
        require("group_size", self.g, at_least(2))
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
            self.training(number)  # the parts' own checks, before anything starts

    @property
    def values(self) -> Values:
        return VALUES[self.protocol]

    @property
    def numbers(self) -> list[int]:
        """The stages that run, counted from 1."""
        return [*range(1, len(self.values.stages) + 1)] if self.stage == "all" else [int(self.stage)]

    @property
    def g(self) -> int:
        return self.group_size or self.values.group_size

    def stage_of(self, number: int) -> Stage:
        """Returns the protocol's stage, with the steps that are given."""
        stage = self.values.stages[number - 1]
        return replace(stage, steps=self.steps[self.numbers.index(number)]) if self.steps else stage

    def seed_of(self, number: int) -> int:
        """Returns a seed of the stage's own: each stage draws other prompts and samples."""
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
        """Returns the tokens of the longest trajectory of a stage or of its evaluations."""
        evaluated = self.evaluated.max_tokens if self.eval_sets else 0
        return max(self.rollout_of(number).max_tokens, evaluated)

    def training(self, number: int, learner_state: Path | None = None) -> TrainingConfig:
        """Returns the configuration of a stage that begins with `model`. Raises ValueError."""
        values, steps = self.values, self.stage_of(number).steps
        oversample = values.oversample if self.algorithm == "roc" else 1
        fields = {**self.run_fields, "seed": self.seed_of(number)}
        return TrainingConfig(
            checkpoint=self.model,
            learner_state=learner_state,
            steps=steps,
            prompts_per_step=self.prompts_per_step or values.prompts_per_step,
            group=GroupConfig(samples=oversample * self.g),
            rollout=self.rollout_of(number),
            learner=self.replica.learner(self.learner).for_run(steps),
            replica=self.replica.config(self.model, self.longest(number), self.devices),
            chat=PROTOCOLS[self.protocol].chat(),
            sandbox=self.sandbox.config(),
            title=f"{'GRPO-RoC' if self.algorithm == 'roc' else 'GRPO'}, stage {number}",
            **fields,
        )

    def enough(self, number: int) -> Callable[[Sequence[Mapping[str, float]]], str | None]:
        """Returns the rule that may end a stage before its steps are over. The last stage has none."""
        if self.switch == "steps" or number == len(self.values.stages):
            return lambda steps: None
        return self.plateau.enough


@dataclass(frozen=True, kw_only=True)
class ReleaseConfig(Config):
    """Has the same options with the release's defaults."""

    protocol: ProtocolName = "release"
    learner: LearnerConfig = RELEASE.learner


@dataclass(frozen=True, kw_only=True)
class ChainInvocation(Invocation):
    """Says where the stages are written, each in a folder of its own."""

    name: str = "rstar2"

    def __post_init__(self) -> None:
        Invocation.__post_init__(self)
        if self.fresh:
            raise ValueError("fresh must be false: a chain is not begun anew within itself. Fix: another name=")


async def train(config: Config, run: Run) -> dict[str, Any]:
    """Trains one stage.

    On a rollout node and in a replay its files may be missing: prompts come from elsewhere there.
    """
    [number] = config.numbers
    goes_on = not config.stage_of(number).new_optimizer
    settings = config.training(number, optimizer_before(run.folder.path.parent, number) if goes_on else None)
    prompts = open_data(config.data, seed=settings.seed, epochs=None) if config.data.exists() else iter(())
    sets = named_sets([path for path in config.eval_sets if path.exists()], config.eval_problems)
    make_balancer = partial(KvAware, config.longest(number), moves=0)
    selector = RoC(keep=config.g) if config.algorithm == "roc" else KeepAll()
    async with training(settings, run, make_balancer=make_balancer, sinks=config.sinks(run)) as job:
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
                job.train(make_batch, evaluations=evaluations, enough=config.enough(number)),
            ]
        )


def run_stages(config: Config, chain: Path, machines: Machines, metrics_port: int | None = None) -> int:
    """Runs the stages that are asked for, each from where it stopped, until one fails. Returns the exit code.

    chain: the folder of their runs. Raises BadInput.
    """
    check_exists("data", config.data)
    check_exists("eval_sets", *config.eval_sets)
    code, data = 0, config.data
    for number in config.numbers:
        if config.stage == "all" and config.stage_of(number).unsolved_only:
            before = filter_config(config, number, chain)
            code, data = filter_unsolved(before), before.output / "filtered.jsonl"
        one = replace(config, stage=STAGES[number - 1], steps=(config.stage_of(number).steps,), data=data)
        if code := code or run_stage(one, chain, machines, metrics_port):
            return code
    return 0


def run_stage(config: Config, chain: Path, machines: Machines, metrics_port: int | None) -> int:
    """Runs the one stage of this configuration in a folder of its own, if it has not ended there.

    Returns the exit code. Raises BadInput.
    """
    [number], [steps] = config.numbers, config.steps
    console, path, before = Console(), folder_of(chain, number), folder_of(chain, number - 1)
    weights = weights_before(chain, number)
    if number > 1 and weights is None:
        say(console, f"no {before}: stage {number} begins with {config.model} and a new optimizer")
    elif number > 1 and not config.stage_of(number).new_optimizer and optimizer_before(chain, number) is None:
        say(console, f"{before} holds no state: stage {number} begins with a new optimizer")
    config = replace(config, model=weights or config.model)
    identity = identity_of(config)
    check_same(path, identity)
    if has_ended(path, steps):
        say(console, f"stage {number} has ended: {path}")
        return 0
    return run_in(
        partial(open_stage, path, identity, steps),
        recipe,
        config,
        lead_of(machines, recipe, config),
        values={**flat(config), **identity.values, "steps": steps},
        again=shlex.join([sys.executable, *sys.argv]),
        metrics_port=metrics_port,
    )


def identity_of(config: Config) -> Identity:
    """Returns what a stage must keep when it goes on: options, weights and data."""
    values = {**flat(config), "weights": fingerprint(config.model), "data_sha256": sha256(config.data)}
    return Identity(values, free=FREE_OF_A_STAGE)


def filter_unsolved(config: offline.Config) -> int:
    """Drops the problems that are always solved; the job can be resumed. Returns the exit code."""
    if (config.output / "filter.json").exists():  # complete; made again it might hold what failed then
        open_output(config.output, config.identity())
        return 0
    return run_job("rl", offline.filter_data(config))


def filter_config(config: Config, number: int, chain: Path) -> offline.Config:
    """Returns the options of the job before a stage. It has the budgets of the stage before, and all GPUs, since no
    learner runs beside it.
    """
    replicas = len(config.devices) // config.tensor_parallel if config.devices else config.replicas
    return offline.Config(
        model=folder_of(chain, number - 1) / "checkpoint",
        data=config.data,
        output=chain / "filter",
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
        dtype=config.dtype or "float32",
        seed=config.seed,
        replica=config.replica,
        sandbox=config.sandbox,
    )


def main(argv: Sequence[str]) -> int:
    begin()
    invocation, config, machines = parse_all([ChainInvocation, Config, Machines], argv, description=__doc__)
    if config.protocol == "release":  # it has defaults of its own
        invocation, config, machines = parse_all([ChainInvocation, ReleaseConfig, Machines], argv)
    if machines.dry_run:
        here = shlex.join([sys.executable, *sys.argv[:1], *(word for word in argv if not word.startswith("dry_run="))])
        print("\n".join(commands(here, lead_of(machines, recipe, config))))
        return 0
    try:
        return run_stages(config, invocation.runs / invocation.name, machines, invocation.metrics_port)
    except BadInput as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2


recipe = Recipe(config=Config, train=train, main=main)

if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
