"""Trains the tiny agent with the tools of an MCP server, and logs a second reward that is not trained on.

    python recipes/environments/mcp_agent.py steps=8
    python recipes/environments/mcp_agent.py url=http://localhost:8000/mcp

By default the server is `mcp_calculator.py`, which is started here; needs the package `mcp` (`pip install "mcp>=2.3"`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from algo.eval_stats import avg_at_k
from algo.reward.combine import Weighted
from algo.reward.math_reward import MathReward
from engine.assembly.training import training
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.telemetry.watchdog import exit_process
from engine.tools.mcp_tools import mcp_tools
from engine.types import Trajectory
from recipes.options import EvalOptions
from recipes.tiny.task import prompts

CALCULATOR = [sys.executable, str(Path(__file__).with_name("mcp_calculator.py"))]


@dataclass(frozen=True, kw_only=True)
class Config(EvalOptions):
    url: Annotated[str, "address of a running MCP server (streamable HTTP); empty: start the calculator"] = ""
    steps: int = 20
    eval_problems: int = 128


async def word_count(trajectory: Trajectory) -> float:
    return float(len(trajectory.text.split()))


async def train(config: Config, run: Run) -> dict[str, Any]:
    server: dict[str, Any] = {"url": config.url} if config.url else {"command": CALCULATOR}
    held_out = list(islice(prompts("test", 0), config.eval_problems))
    async with (
        training(config.training(), run, sinks=config.sinks(run)) as job,
        mcp_tools(**server, call_s=5.0) as tools,
    ):
        rollouts = job.rollouts(tools)
        reward = Weighted({"correct": (1.0, MathReward(integers_only=True)), "words": (0.0, word_count)})
        evaluation = await job.evaluation(held_out, reward, rollouts=rollouts, estimate=avg_at_k, **config.evaluating)
        return await job.run(
            [
                job.admit(prompts("train", config.seed)),
                job.group(rollouts, reward, config.select),
                job.batch(),
                job.train(config.make_batch, evaluations=[evaluation]),
            ]
        )


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(recipe))
