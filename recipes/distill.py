"""Distils a teacher into a student on the student's own rollouts: every token that it samples is rated at once.

    python recipes/distill.py teacher=runs/quickstart/checkpoint [field=value ...]     (--help lists the fields)
    python recipes/distill.py teacher=http://gpu-2:8000/v1 model=models/Qwen3-0.6B ...

The student is the tiny agent before its reinforcement, the task that of the quick start. A teacher is a folder, which a
replica beside the student's serves, or a server: `rocstar gateway`, or vLLM's own. It may be of another size, and must
have the student's vocabulary. recipes/distill.md says what is learnt, and how to distil another pair.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal

from algo.distill import CLIP, distilled
from algo.eval_stats import avg_at_k
from algo.group.batch import select_and_score
from algo.learner.config import LearnerConfig
from algo.loss.distillation import TopK
from algo.reward.math_reward import MathReward
from engine.assembly.config import TrainingConfig
from engine.assembly.training import training
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.replica.port import MOST_TOP
from engine.teacher.config import TeacherConfig
from engine.teacher.opened import teacher_of
from engine.telemetry.watchdog import exit_process
from recipes.options import ADVANTAGES, EvalOptions, SandboxOptions
from recipes.tiny.task import prompts, python_tool
from sandbox import TIERS
from sandbox.require import at_least, positive, require, within


@dataclass(frozen=True, kw_only=True)
class Config(EvalOptions, SandboxOptions):
    """The shared options (recipes/options.py), with fewer and smaller steps: each token teaches, not each answer."""

    teacher: Annotated[str, "checkpoint, a Hugging Face folder; or a server, http://HOST:PORT/v1"] = ""
    reward_weight: Annotated[
        float, "weight of the group's advantages beside the teacher's; 0: rewards are only shown"
    ] = 0.0
    kl_clip: Annotated[float, "nats: bound of |teacher - sampler| of a token's log-probability, its advantage"] = CLIP
    top_k: Annotated[
        int, "compare this many of the teacher's likeliest tokens in place of the sampled one, up to 20"
    ] = 0
    direction: Annotated[Literal["reverse", "forward"], "with top_k: KL(student || teacher), or the other way"] = (
        "reverse"
    )
    teacher_deadline_s: Annotated[float, "seconds in which the teacher must score a turn; then the run stops"] = 120.0
    teacher_devices: Annotated[tuple[int, ...], "GPUs of a teacher in a folder; none: the CPU"] = ()
    algorithm: Literal["roc", "grpo", "random"] = "grpo"
    steps: int = 30
    group_size: int = 2
    eval_every: int = 2
    slots: int | None = 8
    tool_wall_s: float = 2.0
    learner: LearnerConfig = LearnerConfig(lr=1e-3, minibatches=2)  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        require("reward_weight", self.reward_weight, at_least(0))
        require("kl_clip", self.kl_clip, positive)
        require("top_k", self.top_k, within(f"[0, {MOST_TOP}]"))
        if self.direction == "forward" and not self.top_k:
            raise ValueError(
                "direction=forward compares the teacher's likeliest tokens, and top_k is 0. Fix: top_k=8, or leave "
                "direction out"
            )
        if self.stop_flat_after is not None:
            raise ValueError(
                f"stop_flat_after must be none, got {self.stop_flat_after}: it drops groups of equal rewards, which "
                "are trained here too"
            )
        self.of_teacher.check_student(self.model, max_tokens=self.rollout.max_tokens)
        super().__post_init__()

    @property
    def least_group_size(self) -> int:
        """The teacher rates each trajectory by itself; only rewards are compared within a group."""
        return 2 if self.reward_weight else 1

    @property
    def clip(self) -> float | None:
        """The bound of a token's advantage; None with `top_k`, where nothing is clipped."""
        return None if self.top_k else self.kl_clip

    @property
    def of_teacher(self) -> TeacherConfig:
        """The teacher, and what it is asked."""
        return TeacherConfig(
            teacher=self.teacher, top=self.top_k, deadline_s=self.teacher_deadline_s, devices=self.teacher_devices
        )

    def training(self) -> TrainingConfig:
        config = super().training()
        learner = config.learner
        if self.top_k:
            learner = replace(learner, loss=TopK(direction=self.direction, policy=self.policy_loss))
        return replace(
            config,
            learner=learner,
            sandbox=self.sandbox(TIERS[:1], memory_bytes=512 << 20),  # no import of this task needs another tier
            title="on-policy distillation",
        )


async def train(config: Config, run: Run) -> dict[str, Any]:
    held_out = list(islice(prompts("test", 0), config.eval_problems))
    advantage = ADVANTAGES[config.advantage]
    select = select_and_score(config.selector, config.seed, advantage=advantage, keep_flat=True)
    make_batch = partial(
        distilled, clip=config.kl_clip, reward_weight=config.reward_weight, top=config.top_k, advantage=advantage
    )
    async with (
        training(config.training(), run, sinks=config.sinks(run)) as job,
        teacher_of(
            config.of_teacher,
            student=config.model,
            chat=job.chat,
            max_tokens=config.rollout.max_tokens,
            replicas=config.replicas,
            note=job.note,
        ) as teacher,
    ):
        rollouts = job.rollouts([python_tool(job.sandbox)])
        reward = MathReward(integers_only=True)
        evaluation = await job.evaluation(held_out, reward, rollouts=rollouts, estimate=avg_at_k, **config.evaluating)
        return await job.run(
            [
                job.admit(prompts("train", config.seed)),
                job.group(teacher.scores(rollouts), reward, select),
                job.batch(),
                job.train(make_batch, evaluations=[evaluation], measure=partial(teacher.measured, clip=config.clip)),
            ]
        )


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(recipe))
