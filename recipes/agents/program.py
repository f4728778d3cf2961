"""Trains an agent that is a program of its own, by default `openai_program.py`.

    python recipes/agents/program.py [program="my-agent --model {model} -p {prompt}"] [field=value ...]

A program is started anew for each rollout: an evaluation of 16 problems and a step of 64 rollouts start 80 of them.
"""

import shlex
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from algo.eval_stats import avg_at_k
from algo.reward.math_reward import MathReward
from engine.assembly.training import training
from engine.gateway.program import Command
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.telemetry.watchdog import exit_process
from recipes.options import EvalOptions
from recipes.tiny.task import prompts

EXAMPLE = shlex.join([sys.executable, str(Path(__file__).with_name("openai_program.py"))])


@dataclass(frozen=True, kw_only=True)
class Config(EvalOptions):
    program: Annotated[str, "command of the agent, as in a shell, with {prompt}, {model} and so on"] = EXAMPLE
    steps: int = 10
    prompts_per_step: int = 4
    eval_problems: int = 16


async def train(config: Config, run: Run) -> dict[str, Any]:
    held_out = list(islice(prompts("test", 0), config.eval_problems))
    async with training(config.training(), run, sinks=config.sinks(run)) as job:
        rollouts = await job.agents(Command(argv=tuple(shlex.split(config.program))), at_once=8)
        reward = MathReward(integers_only=True)
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
