"""Trains on an environment of `verifiers` (version 1), which plays the episodes and gives the rewards.

    pip install verifiers
    python recipes/environments/train_verifiers.py taskset=my-taskset harness=my-harness [field=value ...]

The other fields are those of recipes/quickstart.py. Programs of the harness run in verifiers' own runtime: `subprocess`
runs them on this machine, without isolation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from algo.group.batch import make_batch, select_and_score
from engine.assembly.training import training
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.telemetry.watchdog import exit_process
from recipes.environments.verifiers_env import EpisodeReward, VerifiersEnvironment, load_environment
from recipes.quickstart import Config as Quickstart


@dataclass(frozen=True, kw_only=True)
class Config(Quickstart):
    taskset: Annotated[str, "package of the tasks"] = ""
    environment: Annotated[str, "how a task is played; empty: the taskset's own, or by one agent"] = ""
    harness: Annotated[str, "program of the agent; empty: the taskset's"] = ""
    runtime: Annotated[Literal["subprocess", "docker"], "where the program runs"] = "subprocess"

    def environment_config(self) -> dict[str, Any]:
        agent: dict[str, Any] = {"runtime": {"type": self.runtime}}
        if self.harness:
            agent["harness"] = {"id": self.harness}
        return {"id": self.environment, "taskset": {"id": self.taskset}, "agent": agent}


async def train(config: Config, run: Run) -> dict[str, Any]:
    environment = VerifiersEnvironment(load_environment(config.environment_config()))
    async with environment.serving(), training(config.training(), run) as job:
        rollouts = await job.agents(environment.play)
        groups = job.group(rollouts, EpisodeReward(), select_and_score(config.selector, config.seed))
        stages = [job.admit(environment.prompts()), groups, job.batch(), job.write_rollouts(every=config.eval_every)]
        return await job.run([*stages, job.train(make_batch)])


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(recipe))
