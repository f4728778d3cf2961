"""Trains a tiny agent on a laptop CPU to write and run Python instead of guessing, by GRPO-RoC.

    python recipes/quickstart.py [field=value ...]        (--help lists the fields)

Everything is the real thing: vLLM replicas, jailed tool calls over ZeroMQ, an FSDP learner in a process of its own.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from algo.eval_stats import avg_at_k
from algo.reward.math_reward import MathReward
from algo.reward.tool_errors import ToolErrorPenalty
from engine.assembly.config import TrainingConfig
from engine.assembly.training import training
from engine.console.notes import say
from engine.data.prompts import read_prompts
from engine.ports import Reward
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.telemetry.watchdog import exit_process
from engine.types import Prompt
from recipes.options import EvalOptions, SandboxOptions
from recipes.tiny.task import prompts, python_tool
from sandbox import TIERS
from sandbox.require import at_least, require

KV_BLOCKS = 2048  # on the CPU: all rollouts of a step at once


@dataclass(frozen=True, kw_only=True)
class Config(EvalOptions, SandboxOptions):
    """The shared options (recipes/options.py), whose defaults are those of the tiny agent."""

    slots: int | None = 8
    tool_wall_s: float = 2.0
    data: Annotated[Path | None, "file of questions and answers to train on; none: fresh problems"] = None
    tool_error_penalty: Annotated[float, "times the share of failed calls, this is subtracted from the reward"] = 0.0
    kv_blocks: Annotated[
        int | None, "KV cache blocks of 32 tokens per replica; none: on GPUs all they hold, on the CPU 2,048"
    ] = None

    def __post_init__(self) -> None:
        require("tool_error_penalty", self.tool_error_penalty, at_least(0))
        self.prompts()
        super().__post_init__()

    def prompts(self) -> Iterator[Prompt]:
        """Returns what is trained on, without end. Raises ValueError for a file that holds anything else."""
        if self.data is None:
            return prompts("train", self.seed)
        return read_prompts(self.data, seed=self.seed, epochs=None)

    @property
    def reward(self) -> Reward:
        """The reward that is trained on; held-out figures are of right answers alone."""
        right, penalty = MathReward(integers_only=True), self.tool_error_penalty
        return ToolErrorPenalty(reward=right, factor=penalty) if penalty else right

    def training(self) -> TrainingConfig:
        config = super().training()
        assert config.replica is not None
        blocks = KV_BLOCKS if self.kv_blocks is None and not self.devices else self.kv_blocks
        return replace(
            config,
            replica=replace(config.replica, kv_blocks=blocks),
            sandbox=self.sandbox(TIERS[:1], memory_bytes=512 << 20),  # no import of this task needs another tier
        )


async def train(config: Config, run: Run) -> dict[str, Any]:
    held_out = list(islice(prompts("test", 0), config.eval_problems))
    async with training(config.training(), run, sinks=config.sinks(run)) as job:
        rollouts = job.rollouts([python_tool(job.sandbox)])
        right = MathReward(integers_only=True)
        evaluation = await job.evaluation(held_out, right, rollouts=rollouts, estimate=avg_at_k, **config.evaluating)
        summary = await job.run(
            [
                job.admit(config.prompts()),
                job.group(rollouts, config.reward, config.select),
                job.batch(),
                job.train(config.make_batch, evaluations=[evaluation]),
            ]
        )
        seconds = job.recorder.progress.seconds_to(0.9)
        if seconds is not None:
            say(job.console, f"  held-out accuracy 0.9 after {seconds:.1f} s of training")
        talk = shlex.join([sys.executable, "recipes/tiny/chat.py", f"checkpoint={run.folder.path}"])
        say(job.console, f"  talk to the trained agent: {talk}")
        return summary


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(recipe))
