"""Trains the tiny agent on several sources at once: its own arithmetic and two families of reasoning-gym.

    pip install reasoning-gym
    python recipes/environments/mixture.py [field=value ...]      (the fields of recipes/quickstart.py, and these)

What is solved nearly always, or nearly never, is drawn less. metrics.jsonl has reward, length, tool errors and goodput
of each source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from algo.group.batch import make_batch, select_and_score
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


@dataclass(frozen=True, kw_only=True)
class Config(Quickstart):
    families: Annotated[tuple[str, ...], "of reasoning-gym"] = ("chain_sum", "basic_arithmetic")
    family_weight: Annotated[float, "of each family, where the arithmetic has 1"] = 0.5
    low: Annotated[float, "pass rate below which a source is drawn less"] = 0.05
    high: Annotated[float, "pass rate above which a source is drawn less"] = 0.95


class Arithmetic(Iterator[Prompt]):
    """The quick start's problems, as a source with a name."""

    name = ARITHMETIC

    def __init__(self, seed: int) -> None:
        self._prompts = prompts("train", seed)

    def __next__(self) -> Prompt:
        return replace(next(self._prompts), source=ARITHMETIC, reward=ARITHMETIC)


async def train(config: Config, run: Run) -> dict[str, Any]:
    families = [Family(name, seed=config.seed) for name in config.families]  # named at once where there is no such
    async with training(config.training(), run) as job:
        sources = mixture(
            {Arithmetic(config.seed): 1.0, **dict.fromkeys(families, config.family_weight)},
            curriculum=PassRateBand(low=config.low, high=config.high),
            steps=job.steps,
        )
        reward = ByName({ARITHMETIC: MathReward(integers_only=True), REWARD: FamilyReward()})
        groups = job.group(
            job.rollouts([python_tool(job.sandbox)]), reward, select_and_score(config.selector, config.seed)
        )
        stages = [job.admit(sources), groups, job.batch(), job.write_rollouts(every=config.eval_every)]
        return await job.run([*stages, job.train(make_batch)])


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(recipe))
