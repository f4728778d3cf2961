"""Trains a model to edit and test small workspaces over several turns, graded by hidden tests.

    python recipes/tools/files.py model=models/Qwen3-1.7B [field=value ...]         (--help lists the fields)
    python recipes/tools/files.py model=... tasks=my-tasks held_out=my-other-tasks  (folders in the shape of Harbor)

Each trajectory has a workspace of its own, which begins with the task's files. The model lists, reads, writes and runs
them. What it has left is graded by tests that it never sees. recipes/tools/README.md says how.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from algo.eval_stats import avg_at_k
from engine.assembly.config import TrainingConfig
from engine.assembly.training import training
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.rollout.rollout import RolloutConfig
from engine.telemetry.watchdog import exit_process
from engine.types import Prompt
from recipes.options import EvalOptions, SandboxOptions
from recipes.tools.exercises import exercises
from recipes.tools.guest import TOOLS
from recipes.tools.harbor import read_tasks
from recipes.tools.hidden_tests import HiddenTests
from recipes.tools.soundness import require_sound, task_check, verdicts_of
from recipes.tools.workspace import Workspaces
from sandbox.require import at_least, require


@dataclass(frozen=True, kw_only=True)
class Config(EvalOptions, SandboxOptions):
    """The shared options (recipes/options.py), and the tasks."""

    tasks: Annotated[Path | None, "folder of tasks in the shape of Harbor; none: generated exercises"] = None
    held_out: Annotated[Path | None, "folder of tasks that are evaluated and never trained"] = None
    share: Annotated[bool, "the reward is the share of tests that pass, in place of 1 for all of them"] = False
    check: Annotated[bool, "run the tests of all tasks on their references before training"] = True
    output_chars: Annotated[int, "characters of a tool's answer that the model reads"] = 2000
    rollout: RolloutConfig = RolloutConfig(max_tokens=4096, max_turns=12)  # noqa: RUF009  frozen
    eval_problems: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require("output_chars", self.output_chars, at_least(20))
        if (self.tasks is None) != (self.held_out is None):
            raise ValueError("tasks and held_out must both be given, or neither: the exercises come in both splits")

    def training(self) -> TrainingConfig:
        return replace(super().training(), sandbox=self.sandbox((TOOLS,)))

    def prompts(self, split: str) -> Iterator[Prompt]:
        """Yields the tasks of a split; those of a folder come again in each epoch, under other ids."""
        folder = self.tasks if split == "train" else self.held_out
        if folder is None:
            return exercises("train" if split == "train" else "test", self.seed if split == "train" else 0)
        tasks = list(read_tasks(folder))
        return prompts_by_epoch(tasks) if split == "train" else iter(tasks)


def prompts_by_epoch(prompts: Sequence[Prompt]) -> Iterator[Prompt]:
    """Yields the same prompts again in each epoch, under other ids."""
    epoch = 0
    while True:
        yield from (replace(prompt, id=f"{prompt.id}@{epoch}") for prompt in prompts)
        epoch += 1


async def train(config: Config, run: Run) -> dict[str, Any]:
    held_out = list(islice(config.prompts("test"), config.eval_problems))
    async with training(config.training(), run, sinks=config.sinks(run)) as job:
        if config.check and config.tasks is not None:
            check = task_check(HiddenTests(job.sandbox, wall_s=config.tool_wall_s))
            require_sound(await verdicts_of([*read_tasks(config.tasks), *held_out], check))
        world = Workspaces(job.sandbox, wall_s=config.tool_wall_s, output_chars=config.output_chars)
        rollouts = job.rollouts([world])
        reward = HiddenTests(job.sandbox, share=config.share, wall_s=config.tool_wall_s)
        evaluation = await job.evaluation(held_out, reward, rollouts=rollouts, estimate=avg_at_k, **config.evaluating)
        return await job.run(
            [
                job.admit(config.prompts("train")),
                job.group(rollouts, reward, config.select),
                job.batch(),
                job.train(config.make_batch, evaluations=[evaluation]),
            ]
        )


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(recipe))
