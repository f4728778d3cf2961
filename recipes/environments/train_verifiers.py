"""Trains on an environment of `verifiers` (version 1), which plays the episodes and gives the rewards.

    pip install verifiers
    python recipes/environments/train_verifiers.py taskset=my-taskset harness=my-harness [field=value ...]

The other fields are those of recipes/options.py. Programs of the harness run in verifiers' own runtime: `subprocess`
runs them on this machine, without isolation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from engine.assembly.training import training
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.telemetry.watchdog import exit_process
from recipes.environments.verifiers_env import EpisodeReward, VerifiersEnvironment, load_environment
from recipes.options import Options


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    taskset: Annotated[str, "package of the tasks"] = ""
    environment: Annotated[str, "how a task is played; empty: as the taskset says, or by one agent"] = ""
    harness: Annotated[str, "program of the agent; empty: the one that the taskset names"] = ""
    runtime: Annotated[Literal["subprocess", "docker"], "where the program runs"] = "subprocess"

    def environment_config(self) -> dict[str, Any]:
        agent: dict[str, Any] = {"runtime": {"type": self.runtime}}
        if self.harness:
            agent["harness"] = {"id": self.harness}
        return {"id": self.environment, "taskset": {"id": self.taskset}, "agent": agent}


async def train(config: Config, run: Run) -> dict[str, Any]:
    environment = VerifiersEnvironment(load_environment(config.environment_config()))
    async with environment.serving(), training(config.training(), run, sinks=config.sinks(run)) as job:
        rollouts = await job.agents(environment.play)
        return await job.run(
            [
                job.admit(environment.prompts()),
                job.group(rollouts, EpisodeReward(), config.select),
                job.batch(),
                job.train(config.make_batch),
            ]
        )


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(recipe))
