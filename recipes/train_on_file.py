"""Trains a model on questions and answers from a file: Python sessions as its tool, answers graded as mathematics.

    python recipes/train_on_file.py model=models/Qwen3-1.7B data=train.parquet held_out=test.jsonl devices=0 replicas=1
    python recipes/train_on_file.py data=train.jsonl held_out=test.jsonl      (the tiny agent, on the CPU)

A row needs a question and an answer (`engine.data.prompts.read_prompts` lists the columns that are known by
themselves). What is graded is the `<answer>\\boxed{...}</answer>` of a trajectory's last turn. By default a system
message asks for it; `system=` gives another message, and `system=""` none. The tiny agent answers so without being
asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from algo.eval_stats import avg_at_k
from algo.group.batch import make_batch, select_and_score
from algo.group.roc import RoC
from algo.learner.config import LearnerConfig
from algo.reward.answers import ASK_FOR_ANSWER
from algo.reward.grade_math import GRADER_MODULES
from algo.reward.math_reward import MathReward
from engine.assembly.devices import DevicePlan
from engine.assembly.training import TrainingConfig, training
from engine.data.prompts import after_hashes, read_prompts
from engine.pipeline.pipeline import Inbox, Outbox, Stage
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.recording.policy import RecordConfig
from engine.rollout.chat_template import ChatConfig
from engine.rollout.rollout import RolloutConfig
from engine.stages.group import GroupConfig
from engine.telemetry.sinks import WeightsAndBiases
from engine.telemetry.watchdog import exit_process
from engine.tools.python_tool import PythonSessions
from recipes.tiny.task import SHIPPED
from sandbox import TIERS, SandboxConfig, Tier

GRADER = Tier(name="grader", preload=GRADER_MODULES)


@dataclass(frozen=True, kw_only=True)
class Config:
    model: Annotated[Path, "Hugging Face folder"] = SHIPPED
    data: Annotated[Path, "JSONL, parquet or a datasets folder: what is trained on"] = Path("train.jsonl")
    held_out: Annotated[Path, "likewise: what is evaluated on"] = Path("test.jsonl")
    after_hashes: Annotated[bool, "the answer is what follows ####, as in GSM8K"] = False
    system: Annotated[str | None, "a system message; none: one that asks for <answer>\\boxed{...}</answer>"] = None
    steps: Annotated[int, "optimizer batches"] = 100
    prompts_per_step: Annotated[int, "groups per step"] = 16
    group_size: Annotated[int, "trajectories trained per group, of twice as many rollouts"] = 8
    skip_above: Annotated[float, "share of right answers above which a group is not trained"] = 1.0
    eval_problems: Annotated[int, "of held_out"] = 256
    eval_every: Annotated[int, "steps between evaluations"] = 10
    replicas: Annotated[int, "vLLM engines"] = 2
    devices: Annotated[tuple[int, ...], "GPUs, the learner's first, or all by turns; none: the CPU"] = ()
    step_deadline_s: Annotated[float, "in which the learner must have trained a step"] = 600.0
    start_deadline_s: Annotated[float | None, "in which replicas and learner must be up; none: 300 and 600"] = None
    canary_tolerance: Annotated[
        float | Literal["auto"] | None, "mean difference of replicas' and learner's log-probabilities; none: not judged"
    ] = "auto"
    wandb: Annotated[Literal["no", "offline", "online"], "Weights & Biases, if it is installed"] = "no"
    seed: Annotated[int, "of data order, sampling, selection and training"] = 0
    rollout: RolloutConfig = RolloutConfig(max_tokens=512, max_turns=5)  # noqa: RUF009  frozen
    learner: LearnerConfig = field(default_factory=lambda: LearnerConfig(lr=1e-5))
    record: RecordConfig = RecordConfig()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        for path in (self.data, self.held_out):
            if not path.exists():
                raise ValueError(f"{path} does not exist. Fix: give data= and held_out=")
        self.training()

    @property
    def system_message(self) -> str | None:
        """None where system= is empty, and by default for the tiny agent, which knows the form of an answer."""
        if self.system is None:
            return None if self.model == SHIPPED else ASK_FOR_ANSWER
        return self.system or None

    def training(self) -> TrainingConfig:
        return TrainingConfig(
            checkpoint=self.model,
            steps=self.steps,
            prompts_per_step=self.prompts_per_step,
            group=GroupConfig(samples=2 * self.group_size),
            rollout=self.rollout,
            learner=self.learner,
            devices=DevicePlan(devices=self.devices, replicas=self.replicas),
            chat=ChatConfig(system=self.system_message),
            sandbox=SandboxConfig(tiers=(*TIERS, GRADER), start_s=60),
            seed=self.seed,
            step_deadline_s=self.step_deadline_s,
            start_deadline_s=self.start_deadline_s,
            canary_tolerance=self.canary_tolerance,
            title="GRPO-RoC",
            record=self.record,
        )


def skip_easy(above: float) -> Callable[[Inbox, Outbox], Any]:
    """A stage that drops the groups whose share of right answers is larger."""

    async def stage(inbox: Inbox, outbox: Outbox) -> None:
        async for group in inbox:
            if group.drop is None and (group.rewards_G > 0).mean() > above:
                group = replace(group, kept=(), advantages_K=None, drop="easy")
            await outbox.put(group)

    return stage


async def train(config: Config, run: Run) -> dict[str, Any]:
    columns: dict[str, Any] = {"answer": after_hashes} if config.after_hashes else {}
    held_out = list(islice(read_prompts(config.held_out, **columns), config.eval_problems))
    sinks = [] if config.wandb == "no" else [WeightsAndBiases(run.folder, mode=config.wandb)]
    async with training(config.training(), run, sinks=sinks) as job:
        rollouts = job.rollouts([PythonSessions(job.sandbox)])
        reward = MathReward(runner=job.sandbox)
        evaluation = await job.evaluation(
            held_out, reward, rollouts=rollouts, estimate=avg_at_k, every=config.eval_every
        )
        return await job.run(
            [
                job.admit(read_prompts(config.data, seed=config.seed, epochs=None, **columns)),
                job.group(rollouts, reward, select_and_score(RoC(keep=config.group_size), config.seed)),
                Stage(name="skip_easy", run=skip_easy(config.skip_above)),
                job.batch(),
                job.write_rollouts(every=config.eval_every),
                job.train(make_batch, evaluations=[evaluation]),
            ]
        )


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(recipe))
