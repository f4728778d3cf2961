"""Checks your tasks, or your questions about databases, before you train on them.

    python recipes/tools/check.py tasks=my-tasks                            (folders in the shape of Harbor)
    python recipes/tools/check.py data=train.json databases=database        (rows in the shape of Spider and BIRD)

It prints a line for each that is broken: hidden tests that do not run, that fail on the reference (the files of
solution/) or pass on the workspace as it begins; references in SQL that do not run. Below it are notes: what has no
reference, or asks for nothing and so has no grade. The exit status is 1 if something is broken.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from engine.console.options import parse
from engine.errors import BadInput
from recipes.tools.database import SqlLimits
from recipes.tools.guest import TOOLS
from recipes.tools.harbor import read_task, task_folders
from recipes.tools.hidden_tests import HiddenTests
from recipes.tools.soundness import Verdict, question_check, task_check, verdicts_of
from recipes.tools.spider import DatabaseFolder, read_questions
from recipes.tools.sql_reward import SqlReward
from sandbox import Limits, Sandbox, SandboxConfig, SandboxUnavailable
from sandbox.require import positive, require


@dataclass(frozen=True, kw_only=True)
class Config:
    tasks: Annotated[Path | None, "folder of tasks in the shape of Harbor"] = None
    data: Annotated[Path | None, "rows with db_id, question and query"] = None
    databases: Annotated[Path | None, "folder of DB_ID/DB_ID.sqlite, for data"] = None
    tool_wall_s: Annotated[float, "time limit of a program or function that a test calls"] = Limits().wall_s
    sql: SqlLimits = field(default_factory=SqlLimits)

    def __post_init__(self) -> None:
        require("tool_wall_s", self.tool_wall_s, positive)
        if (self.data is None) != (self.databases is None) or (self.tasks is None) == (self.data is None):
            raise ValueError("give tasks, or data and databases")


async def verdicts(config: Config) -> list[Verdict]:
    """Returns what is found about each task or question. Raises BadInput for files that cannot be read."""
    async with Sandbox(SandboxConfig(tiers=(TOOLS,), data=config.databases)) as box:
        if config.tasks is not None:
            prompts, refused = [], []
            for folder in task_folders(config.tasks):
                try:
                    prompts.append(read_task(folder))
                except BadInput as error:
                    refused.append(Verdict(task=folder.name, fault=str(error)))
            return [*refused, *await verdicts_of(prompts, task_check(HiddenTests(box, wall_s=config.tool_wall_s)))]
        assert config.data is not None
        assert config.databases is not None
        databases = DatabaseFolder(config.databases, config.sql.database_bytes)
        questions = list(read_questions(config.data, databases))
        return await verdicts_of(questions, question_check(SqlReward(box, databases.find, config.sql)))


def main(config: Config) -> int:
    try:
        found = asyncio.run(verdicts(config))
    except (BadInput, SandboxUnavailable) as error:
        print(f"check.py: {error}", file=sys.stderr)
        return 2
    broken = [each for each in found if each.fault]
    noted = [each for each in found if each.note]
    for each in broken:
        print(f"broken: {each.task}: {each.fault}")
    for each in noted:
        print(f"note: {each.task}: {each.note}")
    print(
        f"{len(found)} checked: {len(found) - len(broken) - len(noted)} sound, {len(broken)} broken, {len(noted)} noted"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(parse(Config, sys.argv[1:], program="python recipes/tools/check.py", description=__doc__)))
