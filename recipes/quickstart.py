"""Trains a tiny agent on a laptop CPU to write and run Python instead of guessing, by GRPO-RoC.

    python recipes/quickstart.py [field=value ...]        (--help lists the fields)

Everything is the real thing: vLLM replicas, jailed tool calls over ZeroMQ, an FSDP learner in a process of its own.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from algo.eval_stats import avg_at_k
from algo.group.advantages import Advantage
from algo.group.batch import make_batch, select_and_score
from algo.group.roc import RoC
from algo.group.selection import KeepAll, RandomSubset
from algo.learner.config import LearnerConfig
from algo.loss.policy_losses import Cispo, Dppo, Gspo, PpoClip, Sapo
from algo.reward.math_reward import MathReward
from engine.assembly.devices import DevicePlan
from engine.assembly.training import BLOCK, TrainingConfig, say, training
from engine.ports import Selector
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.recording.policy import RecordConfig
from engine.replica.config import ReplicaConfig
from engine.rollout.rollout import RolloutConfig
from engine.stages.group import GroupConfig
from engine.telemetry.watchdog import exit_process
from recipes.tiny.task import METHODS, SHIPPED, prompts, python_tool
from sandbox import TIERS, Limits, SandboxConfig

MAX_EVALUATED = 100_000  # an evaluation holds all its trajectories, and a task of each
KV_BLOCKS = 2048  # on the CPU
LOSSES = {"ppo": PpoClip(), "gspo": Gspo(), "cispo": Cispo(), "dppo": Dppo(), "sapo": Sapo()}
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
class Config:
    checkpoint: Annotated[Path, "Hugging Face folder to start from"] = SHIPPED
    algorithm: Annotated[Literal["roc", "grpo", "random"], "roc keeps clean successes; random: control"] = "roc"
    advantage: Annotated[
        Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "opo", "maxrl"],
        "what rewards are compared with and divided by",
    ] = "grpo"
    loss: Annotated[Literal["ppo", "gspo", "cispo", "dppo", "sapo"], "with its defaults"] = "ppo"
    steps: Annotated[int, "optimizer batches; a run that ended goes on when there are more than it had"] = 40
    prompts_per_step: Annotated[int, "groups per step (B)"] = 16
    group_size: Annotated[int, "trajectories trained per group (G)"] = 8
    oversample: Annotated[int, "rollouts per trained trajectory for roc and random (2: the paper's 2G)"] = 2
    extra_samples: Annotated[int, "rollouts per group beyond those needed; the slowest are cancelled"] = 0
    stop_flat_after: Annotated[int | None, "equal rewards after which a group is stopped as flat"] = None
    refills: Annotated[int, "other prompts that may replace a group of which nothing would be trained"] = 0
    max_staleness: Annotated[int, "versions that a trained token may be old (S); 0 is strictly on-policy"] = 0
    checkpoint_every: Annotated[int, "steps between checkpoints; the journal has what follows"] = 4
    eval_every: Annotated[int, "steps between evaluations"] = 8
    eval_problems: Annotated[int, "held-out problems"] = 512
    eval_samples: Annotated[int, "samples per held-out problem (k of avg@k)"] = 1
    eval_replicas: Annotated[int, "engines that evaluate beside training; 0: the replicas do, between steps"] = 0
    replicas: Annotated[int, "vLLM engines"] = 2
    devices: Annotated[tuple[int, ...], "GPUs, the learner's first, or all by turns; none: the CPU"] = ()
    kv_blocks: Annotated[int | None, "KV cache blocks of 32 tokens per replica; none: 2048, on GPUs all they hold"] = (
        None
    )
    learner_ranks: Annotated[int, "FSDP ranks"] = 1
    adapters: Annotated[bool, "with lora_rank: replicas get the adapters alone, versions side by side"] = False
    step_deadline_s: Annotated[float, "in which the learner must have trained a step"] = 600.0
    start_deadline_s: Annotated[float | None, "in which replicas and learner must be up; none: 300 and 600"] = None
    canary_tolerance: Annotated[
        float | Literal["auto"] | None, "mean difference of replicas' and learner's log-probabilities; none: not judged"
    ] = "auto"
    slots: Annotated[int, "tool calls that run at once"] = 8
    tool_wall_s: Annotated[float, "time limit of a tool call"] = 2.0
    seed: Annotated[int, "of the run: prompts, sampling, selection, training order"] = 0
    rollout: RolloutConfig = RolloutConfig(max_tokens=230, max_turns=4)  # noqa: RUF009  frozen
    learner: LearnerConfig = LearnerConfig(lr=5e-4, minibatches=2)  # noqa: RUF009  frozen
    record: RecordConfig = RecordConfig()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        for name in ("oversample", "eval_every", "eval_problems", "eval_samples", "learner_ranks", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.group_size < 2:
            raise ValueError(f"group_size must be at least 2, got {self.group_size}")
        if self.eval_replicas < 0 or (self.eval_replicas and self.devices):
            raise ValueError(f"eval_replicas must be at least 0, and 0 on GPUs, got {self.eval_replicas}")
        if self.learner.minibatches > (trained := self.prompts_per_step * self.group_size):
            raise ValueError(
                f"minibatches={self.learner.minibatches} exceeds prompts_per_step x group_size = {trained}"
            )
        if (evaluated := self.eval_problems * self.eval_samples) > MAX_EVALUATED:
            raise ValueError(f"eval_problems x eval_samples must be at most {MAX_EVALUATED}, got {evaluated}")
        self.training()  # the parts' own checks, before anything starts

    def training(self) -> TrainingConfig:
        samples = self.group_size * (1 if self.algorithm == "grpo" else self.oversample)
        return TrainingConfig(
            checkpoint=self.checkpoint,
            steps=self.steps,
            prompts_per_step=self.prompts_per_step,
            group=GroupConfig(
                samples=samples,
                extra_samples=self.extra_samples,
                stop_flat_after=self.stop_flat_after,
                refills=self.refills,
            ),
            rollout=self.rollout,
            learner=replace(self.learner, loss=LOSSES[self.loss]).for_run(self.steps),
            replica=ReplicaConfig(
                checkpoint=str(self.checkpoint),
                max_model_len=self.rollout.max_tokens + BLOCK,
                kv_blocks=KV_BLOCKS if self.kv_blocks is None and not self.devices else self.kv_blocks,
            ),
            devices=DevicePlan(
                devices=self.devices,
                learner_ranks=self.learner_ranks,
                replicas=self.replicas,
                max_staleness=self.max_staleness,
                adapters=self.adapters,
            ),
            sandbox=SandboxConfig(
                slots=self.slots,
                limits=Limits(wall_s=self.tool_wall_s, cpu_s=self.tool_wall_s, memory_bytes=512 << 20),
                tiers=TIERS[:1],  # no import of this task needs another one
                start_s=60,  # beside engines and learner, on busy cores, a start takes long
            ),
            seed=self.seed,
            max_staleness=self.max_staleness,
            step_deadline_s=self.step_deadline_s,
            start_deadline_s=self.start_deadline_s,
            canary_tolerance=self.canary_tolerance,
            checkpoint_every=self.checkpoint_every,
            title=METHODS[self.algorithm],
            record=self.record,
        )

    @property
    def selector(self) -> Selector:
        keep = self.group_size
        return {"roc": RoC(keep=keep), "random": RandomSubset(keep=keep), "grpo": KeepAll()}[self.algorithm]


async def train(config: Config, run: Run) -> dict[str, Any]:
    held_out = list(islice(prompts("test", 0), config.eval_problems))
    async with training(config.training(), run) as job:
        rollouts, advantage = job.rollouts([python_tool(job.sandbox)]), ADVANTAGES[config.advantage]
        reward = MathReward(integers_only=True)
        evaluation = await job.evaluation(
            held_out,
            reward,
            rollouts=rollouts,
            estimate=avg_at_k,
            every=config.eval_every,
            samples=config.eval_samples,
            replicas=config.eval_replicas,
        )
        summary = await job.run(
            [
                job.admit(prompts("train", config.seed)),
                job.group(rollouts, reward, select_and_score(config.selector, config.seed, advantage=advantage)),
                job.batch(),
                job.write_rollouts(every=config.eval_every),
                job.train(partial(make_batch, advantage=advantage), evaluations=[evaluation]),
            ]
        )
        talk = shlex.join([sys.executable, "recipes/tiny/chat.py", "--checkpoint", str(run.folder.path)])
        say(job.console, f"  talk to the trained agent: {talk}")
        return summary


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(recipe))
