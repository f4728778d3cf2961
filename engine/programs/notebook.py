"""Runs a recipe in an event loop that runs already, as in a notebook or in another program.

from recipes.quickstart import Config, recipe

summary = await run(recipe, Config(steps=4))
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rich.console import Console

from engine.assembly.wiring import check_recipe
from engine.console.notes import say
from engine.console.options import flat
from engine.programs.invocation import Invocation
from engine.programs.main import identity_of, written
from engine.recipe import Recipe, Run
from engine.run.identity import describe
from engine.run.run_folder import RunFolder


async def run(
    recipe: Recipe, config: Any, *, name: str = "", runs: Path = Path("runs"), fresh: bool = False
) -> dict[str, Any]:
    """Runs a recipe as its program does, in a folder of its own, and returns what its `train` returns.

    The same call with the same configuration resumes an interrupted run, unless `fresh`. Cancelling the task ends the
    run, and what it measured is written. Raises what the recipe raises; what a program would tell in one line is
    BadInput, or one of `engine.assembly.expected.EXPECTED`.
    """
    check_recipe(recipe)
    invocation = Invocation(name=name, runs=runs, fresh=fresh).named(recipe.file.stem if recipe.is_file else "notebook")
    identity = None if fresh else identity_of(config)
    with RunFolder.open(runs, invocation.name, identity, steps=config.steps) as folder:
        if not folder.resumed:
            if folder.unfinished is not None:
                old, changed = folder.unfinished.path, describe(folder.unfinished.differences)
                say(Console(), f"{old} did not end and differs in {changed}; a new run begins in {folder.path}")
            folder.json("config.json", {**flat(invocation), **flat(config), **written(recipe, config)})
        try:
            summary: dict[str, Any] = await recipe.train(config, Run(folder=folder))
        except asyncio.CancelledError:
            say(Console(), f"interrupted; what was measured is in {folder.path}. The same call resumes the run")
            raise
        return summary
