"""Trains a model to ask and to change SQLite databases over several turns.

    python recipes/tools/sql.py model=models/Qwen3-1.7B [field=value ...]          (--help lists the fields)
    python recipes/tools/sql.py model=... data=train.json held_out=dev.json databases=database      (Spider, BIRD)

A question is graded by the rows of the SELECT that the model answers with, a change by the database that it has left.
recipes/tools/README.md says how.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
from recipes.tools.database import Databases, Find, SqlLimits
from recipes.tools.files import prompts_by_epoch
from recipes.tools.generated_databases import find, questions
from recipes.tools.guest import TOOLS
from recipes.tools.soundness import question_check, require_sound, verdicts_of
from recipes.tools.spider import DatabaseFolder, read_questions
from recipes.tools.sql_reward import Order, SqlReward


@dataclass(frozen=True, kw_only=True)
class Config(EvalOptions, SandboxOptions):
    """The shared options (recipes/options.py), and the questions."""

    data: Annotated[Path | None, "rows with db_id, question and query; none: generated questions"] = None
    held_out: Annotated[Path | None, "rows that are evaluated and never trained"] = None
    databases: Annotated[Path | None, "folder of DB_ID/DB_ID.sqlite, for data"] = None
    changes: Annotated[float, "share of the generated questions that ask for a change of the database"] = 0.3
    schema: Annotated[bool, "prompts of generated questions show the schema; false: the model has to ask for it"] = True
    check: Annotated[bool, "run all references of data and held_out before training"] = True
    order: Annotated[Order, "whether rows must come in the reference's order: where it has ORDER BY, or ..."] = (
        "reference"
    )
    sql: SqlLimits = field(default_factory=SqlLimits)
    rollout: RolloutConfig = RolloutConfig(max_tokens=2048, max_turns=6)  # noqa: RUF009  frozen
    eval_problems: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({each is None for each in (self.data, self.held_out, self.databases)}) > 1:
            raise ValueError("data, held_out and databases must all be given, or none of them")
        if not self.schema and self.data is not None:
            raise ValueError("schema must be true with data, got false: only generated questions can leave it out")
        if not 0 <= self.changes <= 1:
            raise ValueError(f"changes must be from 0 to 1, got {self.changes}")

    def training(self) -> TrainingConfig:
        return replace(super().training(), sandbox=replace(self.sandbox((TOOLS,)), data=self.databases))

    def sources(self) -> tuple[Find, Iterator[Prompt], Iterator[Prompt]]:
        """Returns what finds a database, the questions to train on, and those that are held out."""
        if self.data is None or self.held_out is None or self.databases is None:
            shared: dict[str, Any] = {"changes": self.changes, "schema": self.schema}
            return find, questions("train", self.seed, **shared), questions("test", 0, **shared)
        folder = DatabaseFolder(self.databases, self.sql.database_bytes)
        train = prompts_by_epoch(list(read_questions(self.data, folder)))
        return folder.find, train, read_questions(self.held_out, folder)


async def train(config: Config, run: Run) -> dict[str, Any]:
    find_database, prompts, unseen = config.sources()
    held_out = list(islice(unseen, config.eval_problems))
    async with training(config.training(), run, sinks=config.sinks(run)) as job:
        rollouts = job.rollouts([Databases(job.sandbox, find_database, config.sql)])
        reward = SqlReward(job.sandbox, find_database, config.sql, order=config.order)
        if config.check and config.data is not None and config.databases is not None:
            databases = DatabaseFolder(config.databases, config.sql.database_bytes)
            asked = [*read_questions(config.data, databases), *held_out]
            require_sound(await verdicts_of(asked, question_check(reward)))
        evaluation = await job.evaluation(held_out, reward, rollouts=rollouts, estimate=avg_at_k, **config.evaluating)
        return await job.run(
            [
                job.admit(prompts),
                job.group(rollouts, reward, config.select),
                job.batch(),
                job.train(config.make_batch, evaluations=[evaluation]),
            ]
        )


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(recipe))
