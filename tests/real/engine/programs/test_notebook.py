"""A recipe in a loop that runs already: its folder is that of a program, and it goes on when it is run again."""

import asyncio
import json
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from engine.programs.notebook import run
from engine.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = 2
    seed: int = 0


async def train(config, run):
    run.folder.step(0, {"reward": 0.0})
    if not run.folder.resumed and config.seed == 1:
        raise asyncio.CancelledError
    run.folder.json("summary.json", {"steps": config.steps})
    return {"resumed": run.folder.resumed, "folder": run.folder.path}


RECIPE = Recipe(config=Config, train=train)


async def test_a_run_is_written_as_its_program_would(tmp_path):
    summary = await run(RECIPE, Config(), runs=tmp_path)
    assert summary == {"resumed": False, "folder": tmp_path / "test_notebook"}
    config = json.loads((tmp_path / "test_notebook" / "config.json").read_text())
    assert (config["steps"], config["seed"], config["recipe"]) == (2, 0, "tests/real/engine/programs/test_notebook.py")
    assert "torch" in config["versions"]


async def test_what_was_interrupted_goes_on_and_other_options_make_a_run_of_their_own(tmp_path, capsys):
    with pytest.raises(asyncio.CancelledError):
        await run(RECIPE, Config(seed=1), runs=tmp_path, name="mine")
    other = await run(RECIPE, Config(seed=2), runs=tmp_path, name="mine")
    assert other == {"resumed": False, "folder": tmp_path / "mine-2"}
    assert "seed" in capsys.readouterr().out
    again = await run(RECIPE, Config(seed=1), runs=tmp_path, name="mine")
    assert again == {"resumed": True, "folder": tmp_path / "mine"}
    anew = await run(RECIPE, Config(seed=2, steps=3), runs=tmp_path, name="mine", fresh=True)
    assert anew == {"resumed": False, "folder": tmp_path / "mine-3"}


async def test_a_recipe_of_a_cell_has_no_file(tmp_path, monkeypatch):
    cell = {"__name__": "a_cell"}
    monkeypatch.setitem(sys.modules, "a_cell", ModuleType("a_cell"))
    exec("async def train(config, run):\n    return {'folder': run.folder.path}\n", cell)
    summary = await run(Recipe(config=Config, train=cell["train"]), Config(), runs=tmp_path)
    assert summary == {"folder": tmp_path / "notebook"}
    assert "recipe" not in json.loads((tmp_path / "notebook" / "config.json").read_text())
