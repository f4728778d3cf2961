"""The options that recipes share, and what follows from them.

A recipe's own options are fields of a class that inherits these. A field that is named again has another default:

    @dataclass(frozen=True, kw_only=True)
    class Config(EvalOptions, SandboxOptions):
        data: Annotated[Path, "what is trained on"] = Path("train.jsonl")
        steps: int = 100

- `RunOptions`: machines, staleness, deadlines, the learner. Enough for a recipe that has plans of its own for all else.
- `Options`: also the model, the groups and the algorithm. `training()`, `select` and `make_batch` follow from them.
- `EvalOptions`: also held-out problems.
- `SandboxOptions`: beside one of these, where tools run Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from algo.group.advantages import Advantage
from algo.group.batch import make_batch, select_and_score
from algo.group.roc import RoC
from algo.group.selection import KeepAll, RandomSubset
from algo.learner.config import LearnerConfig
from algo.loss.policy_losses import Cispo, Dppo, Gspo, PpoClip, Sapo
from engine.assembly.config import BLOCK, TrainingConfig
from engine.assembly.devices import DevicePlan
from engine.ports import Selector
from engine.recipe import Run
from engine.recording.policy import RecordConfig
from engine.replica.config import ReplicaConfig
from engine.rollout.rollout import RolloutConfig
from engine.stages.group import GroupConfig
from engine.telemetry.sinks import MetricSink, WeightsAndBiases
from engine.types import Batch, Group
from recipes.tiny.task import METHODS, SHIPPED
from sandbox import TIERS, Limits, SandboxConfig, Tier
from sandbox.require import at_least, positive, require, require_fields

MAX_EVALUATED = 100_000  # an evaluation holds all its trajectories, and a task of each
PolicyLoss = PpoClip | Gspo | Cispo | Dppo | Sapo
LOSSES: dict[str, PolicyLoss] = {"ppo": PpoClip(), "gspo": Gspo(), "cispo": Cispo(), "dppo": Dppo(), "sapo": Sapo()}
ADVANTAGES = {
    "grpo": Advantage(),
    "dr_grpo": Advantage(scale="none"),
    "rloo": Advantage(baseline="leave_one_out", scale="none"),
    "reinforce++": Advantage(baseline="batch", scale="batch"),
    "reinforce++_baseline": Advantage(scale="batch"),
    "opo": Advantage(baseline="length", scale="none"),
    "maxrl": Advantage(scale="mean"),
}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is carried out, whatever it trains on."""

    replicas: Annotated[int, "vLLM engines"] = 2
    devices: Annotated[tuple[int, ...], "GPUs: the learner's first, or all of them by turns; none: the CPU"] = ()
    tensor_parallel: Annotated[int, "GPUs of a replica; on the CPU processes"] = 1
    learner_ranks: Annotated[int, "FSDP ranks"] = 1
    adapters: Annotated[bool, "with lora_rank: send replicas the adapters alone and serve versions side by side"] = (
        False
    )
    sleep: Annotated[
        bool,
        "replicas on the learner's GPUs sleep while it trains; false: they keep their memory, for a small model",
    ] = True
    eager: Annotated[bool, "replicas on GPUs do not compile: up in seconds, but slower per token"] = False
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        "what replicas and the learner's passes compute in, and weights are published in; none: bfloat16 on GPUs; on "
        "the CPU float32, or what learner.dtype and learner.weights_dtype say (bfloat16 is slow there without "
        "AVX512-BF16 or AMX)",
    ] = None
    max_staleness: Annotated[int, "weight versions that a trained token may be old (S); 0 is strictly on-policy"] = 0
    checkpoint_every: Annotated[int, "steps between checkpoints; the journal has what follows"] = 4
    step_deadline_s: Annotated[float, "seconds in which the learner must have trained a step"] = 600.0
    start_deadline_s: Annotated[float | None, "seconds in which replicas and learner must be up; none: 300 and 600"] = (
        None
    )
    update_deadline_s: Annotated[float | None, "seconds in which a replica must have loaded new weights; none: 60"] = (
        None
    )
    replica_step_deadline_s: Annotated[
        float | None, "seconds after which a replica that makes no step is replaced; none: 300"
    ] = None
    canary_tolerance: Annotated[
        float | Literal["auto"] | None,
        "largest mean difference of the replicas' and the learner's log-probabilities; none: not judged",
    ] = "auto"
    wandb: Annotated[Literal["no", "offline", "online"], "Weights & Biases, if it is installed"] = "no"
    seed: Annotated[int, "seed of prompts, sampling, selection and training"] = 0
    learner: LearnerConfig = LearnerConfig(lr=5e-4, minibatches=2)  # noqa: RUF009  frozen
    record: RecordConfig = RecordConfig()  # noqa: RUF009  frozen

    @property
    def run_fields(self) -> dict[str, Any]:
        """The fields of a TrainingConfig that follow from these options alone."""
        return {
            "devices": DevicePlan(
                devices=self.devices,
                learner_ranks=self.learner_ranks,
                replicas=self.replicas,
                tensor_parallel=self.tensor_parallel,
                max_staleness=self.max_staleness,
                adapters=self.adapters,
                sleep=self.sleep,
                eager=self.eager,
                dtype=self.dtype,
            ),
            "max_staleness": self.max_staleness,
            "checkpoint_every": self.checkpoint_every,
            "step_deadline_s": self.step_deadline_s,
            "start_deadline_s": self.start_deadline_s,
            "update_deadline_s": self.update_deadline_s,
            "replica_step_deadline_s": self.replica_step_deadline_s,
            "canary_tolerance": self.canary_tolerance,
            "seed": self.seed,
            "record": self.record,
        }

    def sinks(self, run: Run) -> list[MetricSink]:
        """Returns the sinks that get the metrics beside the run's folder."""
        return [] if self.wandb == "no" else [WeightsAndBiases(run.folder, mode=self.wandb)]


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """Which model learns, from what, by which algorithm. The defaults suit the tiny agent."""

    model: Annotated[Path, "checkpoint to start from, a Hugging Face folder"] = SHIPPED
    learner_state: Annotated[
        Path | None, "the same run's checkpoints/step-...: its optimizer is used too; none: a new optimizer"
    ] = None
    steps: Annotated[int, "optimizer batches; a run that has ended goes on when it is given more"] = 40
    prompts_per_step: Annotated[int, "groups per step, the batch size (B)"] = 16
    group_size: Annotated[int, "trajectories trained per group (G)"] = 8
    oversample: Annotated[int, "rollouts per trained trajectory for roc and random (2: the paper's 2G)"] = 2
    algorithm: Annotated[Literal["roc", "grpo", "random"], "roc keeps clean successes; random: control"] = "roc"
    advantage: Annotated[
        Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "opo", "maxrl"],
        "what rewards are compared with and divided by",
    ] = "grpo"
    loss: Annotated[Literal["ppo", "gspo", "cispo", "dppo", "sapo"], "the policy loss, with its defaults"] = "ppo"
    clip_high: Annotated[
        float | None, "the ratio's upper bound is 1 + clip_high, for ppo, gspo and cispo; none: the loss's default"
    ] = None
    extra_samples: Annotated[int, "rollouts per group beyond those needed; the slowest are cancelled"] = 0
    stop_flat_after: Annotated[int | None, "equal rewards after which a group is stopped as flat"] = None
    refills: Annotated[int, "other prompts that may replace a group of which nothing would be trained"] = 0
    graders: Annotated[int, "trajectories that are graded at once"] = 8
    kv_blocks: Annotated[
        int | None, "KV cache blocks of 32 tokens per replica; none: on GPUs all they hold, on the CPU 1,024"
    ] = None
    rollout: RolloutConfig = RolloutConfig(max_tokens=230, max_turns=4)  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        for name, least in (("oversample", 1), ("group_size", self.least_group_size)):
            require(name, getattr(self, name), at_least(least))
        for name in ("temperature", "top_p"):
            if (value := getattr(self.rollout, name)) != 1:
                raise ValueError(
                    f"rollout.{name} must be 1, got {value:g}: what is trained is compared with the model's own "
                    "distribution. Fix: leave it out"
                )
        trained = self.prompts_per_step * self.group_size
        if self.learner.minibatches > trained:
            raise ValueError(
                f"minibatches={self.learner.minibatches} exceeds prompts_per_step x group_size = {trained}"
            )
        self.training()  # the parts' own checks, before anything starts

    @property
    def least_group_size(self) -> int:
        """Rewards are compared within a group, so it has two trajectories or more."""
        return 2

    @property
    def policy_loss(self) -> PolicyLoss:
        """The loss with the bound that is given. Raises ValueError for a loss without one."""
        loss = LOSSES[self.loss]
        if self.clip_high is None:
            return loss
        if not isinstance(loss, PpoClip | Gspo | Cispo):
            raise ValueError(f"clip_high must be none for loss={self.loss}, got {self.clip_high}")
        return replace(loss, clip_high=self.clip_high)

    def training(self) -> TrainingConfig:
        """Returns what `engine.assembly.training.training` opens. A recipe replaces what it wants otherwise."""
        samples = self.group_size * (1 if self.algorithm == "grpo" else self.oversample)
        return TrainingConfig(
            checkpoint=self.model,
            learner_state=self.learner_state,
            steps=self.steps,
            prompts_per_step=self.prompts_per_step,
            group=GroupConfig(
                samples=samples,
                extra_samples=self.extra_samples,
                stop_flat_after=self.stop_flat_after,
                refills=self.refills,
                graders=self.graders,
            ),
            rollout=self.rollout,
            learner=replace(self.learner, loss=self.policy_loss).for_run(self.steps),
            replica=ReplicaConfig(
                checkpoint=str(self.model),
                max_model_len=self.rollout.max_tokens + BLOCK,
                kv_blocks=self.kv_blocks,
            ),
            title=METHODS[self.algorithm],
            **self.run_fields,
        )

    @property
    def selector(self) -> Selector:
        """Chooses which trajectories of a group are trained."""
        keep = self.group_size
        made: dict[str, Selector] = {"roc": RoC(keep=keep), "random": RandomSubset(keep=keep), "grpo": KeepAll()}
        return made[self.algorithm]

    @property
    def select(self) -> Callable[[Group], Group]:
        """Selects and scores a group, for `job.group`."""
        return select_and_score(self.selector, self.seed, advantage=ADVANTAGES[self.advantage])

    @property
    def make_batch(self) -> Callable[[int, Sequence[Group]], Batch]:
        """Joins the groups of a step, for `job.train`, with the advantages that need all of them."""
        return partial(make_batch, advantage=ADVANTAGES[self.advantage])


@dataclass(frozen=True, kw_only=True)
class EvalOptions(Options):
    """When a run is evaluated, and on how many held-out problems."""

    eval_every: Annotated[int, "steps between evaluations"] = 8
    eval_problems: Annotated[int, "held-out problems"] = 512
    eval_samples: Annotated[int, "samples per held-out problem (k of avg@k)"] = 1
    eval_replicas: Annotated[int, "engines that evaluate beside training; 0: the replicas do, between steps"] = 0

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "eval_every", "eval_problems", "eval_samples")
        if self.eval_replicas < 0 or (self.eval_replicas and self.devices):
            raise ValueError(f"eval_replicas must be at least 0, and 0 on GPUs, got {self.eval_replicas}")
        evaluated = self.eval_problems * self.eval_samples
        if evaluated > MAX_EVALUATED:
            raise ValueError(f"eval_problems x eval_samples must be at most {MAX_EVALUATED}, got {evaluated}")
        super().__post_init__()

    @property
    def evaluating(self) -> dict[str, int]:
        """Arguments of `job.evaluation`: how often, with how many samples, and on how many replicas."""
        return {"every": self.eval_every, "samples": self.eval_samples, "replicas": self.eval_replicas}


@dataclass(frozen=True, kw_only=True)
class SandboxOptions:
    """The jail in which tools run Python."""

    slots: Annotated[int | None, "tool calls that run at once; none: four per core"] = None
    tool_wall_s: Annotated[float, "time limit of a tool call"] = Limits().wall_s
    sandbox_listen: Annotated[
        str | None, "address where sandbox hosts may join, tcp://0.0.0.0:5555; none: slots alone"
    ] = None
    sandbox_keys: Annotated[Path | None, "folder of `rocstar keys`, for sandbox hosts on other machines"] = None

    def sandbox(self, tiers: Sequence[Tier] = TIERS, memory_bytes: int = Limits().memory_bytes) -> SandboxConfig:
        """tiers: the interpreters that are kept warm. memory_bytes: limit of a call."""
        require("tool_wall_s", self.tool_wall_s, positive)
        if self.slots is not None:
            require("slots", self.slots, at_least(0 if self.sandbox_listen else 1))
        limits = Limits(wall_s=self.tool_wall_s, cpu_s=self.tool_wall_s, memory_bytes=memory_bytes)
        # Beside engines and learner, on busy cores, a start takes long.
        config = SandboxConfig(
            tiers=tuple(tiers), limits=limits, start_s=60, listen=self.sandbox_listen, keys=self.sandbox_keys
        )
        return config if self.slots is None else replace(config, slots=self.slots)


def require_readable(read: Callable[[Path], Any], **files: Path) -> None:
    """Raises ValueError, which names the option, for a file that `read` refuses."""
    for name, path in files.items():
        try:
            read(path)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
