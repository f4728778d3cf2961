"""Trains the tiny agent on several sources at once: its own arithmetic and two families of reasoning-gym.

    pip install reasoning-gym
    python recipes/environments/mixture.py [field=value ...]      (the fields of recipes/quickstart.py, and these)

Sources that are solved nearly always, or nearly never, are drawn less. metrics.jsonl has reward, length, tool errors,
goodput and held-out accuracy of each source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any

from algo.eval_stats import avg_at_k
from algo.reward.combine import ByName
from algo.reward.math_reward import MathReward
from engine.assembly.training import training
from engine.data.mixture import PassRateBand, mixture
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.telemetry.watchdog import exit_process
from engine.types import Prompt
from recipes.environments.gym_families import REWARD, Family, FamilyReward
from recipes.quickstart import Config as Quickstart
from recipes.tiny.task import prompts, python_tool

ARITHMETIC = "arithmetic"
HELD_OUT = 1 << 30  # number of the first held-out problem of a family; training begins at 0


@dataclass(frozen=True, kw_only=True)
class Config(Quickstart):
    families: Annotated[tuple[str, ...], "families of reasoning-gym"] = ("chain_sum", "basic_arithmetic")
    family_weight: Annotated[float, "weight of each family; the arithmetic has 1"] = 0.5
    low: Annotated[float, "pass rate below which a source is drawn less"] = 0.05
    high: Annotated[float, "pass rate above which a source is drawn less"] = 0.95


class Arithmetic(Iterator[Prompt]):
    """The quick start's problems, as a source with a name."""

    name = ARITHMETIC

    def __init__(self, prompts: Iterator[Prompt]) -> None:
        self._prompts = prompts

    def __next__(self) -> Prompt:
        return replace(next(self._prompts), source=ARITHMETIC, reward=ARITHMETIC)


async def train(config: Config, run: Run) -> dict[str, Any]:
    families = [Family(name, seed=config.seed) for name in config.families]  # an unknown one is refused at once
    unseen = [
        Arithmetic(prompts("test", 0)),
        *(Family(name, seed=config.seed, start=HELD_OUT) for name in config.families),
    ]
    held_out = list(islice(mixture(dict.fromkeys(unseen, 1.0)), config.eval_problems))
    async with training(config.training(), run, sinks=config.sinks(run)) as job:
        sources = mixture(
            {Arithmetic(config.prompts()): 1.0, **dict.fromkeys(families, config.family_weight)},
            curriculum=PassRateBand(low=config.low, high=config.high),
            steps=job.steps,
        )
        rollouts = job.rollouts([python_tool(job.sandbox)])
        reward = ByName({ARITHMETIC: config.reward, REWARD: FamilyReward()})
        right = ByName({ARITHMETIC: MathReward(integers_only=True), REWARD: FamilyReward()})
        evaluation = await job.evaluation(held_out, right, rollouts=rollouts, estimate=avg_at_k, **config.evaluating)
        return await job.run(
            [
                job.admit(sources),
                job.group(rollouts, reward, config.select),
                job.batch(),
                job.train(config.make_batch, evaluations=[evaluation]),
            ]
        )


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(recipe))
