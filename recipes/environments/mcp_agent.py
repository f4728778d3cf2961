"""Trains the tiny agent with the tools of an MCP server, and watches a second reward that is only looked at.

    python recipes/environments/mcp_agent.py steps=8
    python recipes/environments/mcp_agent.py url=http://localhost:8000/mcp

By default the server is `mcp_calculator.py`, which is started here; needs the package `mcp` (`pip install "mcp>=2.3"`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run in place: the packages lie in the repository root

from algo.eval_stats import avg_at_k
from algo.group.batch import make_batch, select_and_score
from algo.group.roc import RoC
from algo.learner.config import LearnerConfig
from algo.reward.combine import Weighted
from algo.reward.math_reward import MathReward
from engine.assembly.training import TrainingConfig, training
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.recording.policy import RecordConfig
from engine.rollout.rollout import RolloutConfig
from engine.stages.group import GroupConfig
from engine.telemetry.watchdog import exit_process
from engine.tools.mcp_tools import mcp_tools
from engine.types import Trajectory
from recipes.tiny.task import SHIPPED, prompts

CALCULATOR = [sys.executable, str(Path(__file__).with_name("mcp_calculator.py"))]


@dataclass(frozen=True, kw_only=True)
class Config:
    url: Annotated[str, "of an MCP server that is there (streamable HTTP); empty: the calculator is started"] = ""
    steps: Annotated[int, "optimizer batches"] = 20
    prompts_per_step: Annotated[int, "groups per step"] = 16
    group_size: Annotated[int, "trajectories trained per group, of twice as many rollouts"] = 8
    eval_problems: Annotated[int, "held-out problems"] = 128
    step_deadline_s: Annotated[float, "in which the learner must have trained a step"] = 600.0
    start_deadline_s: Annotated[float | None, "in which replicas and learner must be up; none: 300 and 600"] = None
    canary_tolerance: Annotated[
        float | Literal["auto"] | None, "mean difference of replicas' and learner's log-probabilities; none: not judged"
    ] = "auto"
    seed: Annotated[int, "of prompts, sampling, selection and training"] = 0
    record: RecordConfig = RecordConfig()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        self.training()  # the parts' own checks, before anything starts

    def training(self) -> TrainingConfig:
        return TrainingConfig(
            checkpoint=SHIPPED,
            steps=self.steps,
            prompts_per_step=self.prompts_per_step,
            group=GroupConfig(samples=2 * self.group_size),
            rollout=RolloutConfig(max_tokens=230, max_turns=4),
            learner=LearnerConfig(lr=5e-4, minibatches=2).for_run(self.steps),
            step_deadline_s=self.step_deadline_s,
            start_deadline_s=self.start_deadline_s,
            canary_tolerance=self.canary_tolerance,
            seed=self.seed,
            title="GRPO-RoC with MCP tools",
            record=self.record,
        )


async def words(trajectory: Trajectory) -> float:
    return float(len(trajectory.text.split()))


async def train(config: Config, run: Run) -> dict[str, Any]:
    server: dict[str, Any] = {"url": config.url} if config.url else {"command": CALCULATOR}
    held_out = list(islice(prompts("test", 0), config.eval_problems))
    async with training(config.training(), run) as job, mcp_tools(**server, call_s=5.0) as tools:
        rollouts = job.rollouts(tools)
        reward = Weighted({"correct": (1.0, MathReward(integers_only=True)), "words": (0.0, words)})
        evaluation = await job.evaluation(held_out, reward, rollouts=rollouts, estimate=avg_at_k, every=8)
        return await job.run(
            [
                job.admit(prompts("train", config.seed)),
                job.group(rollouts, reward, select_and_score(RoC(keep=config.group_size), config.seed)),
                job.batch(),
                job.write_rollouts(every=8),
                job.train(make_batch, evaluations=[evaluation]),
            ]
        )


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(recipe))
