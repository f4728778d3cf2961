"""From which turn a recorded trajectory is gone on with, and where the two part."""

import json
import os
import sys
from dataclasses import replace

import pytest

from algo.learner.config import LearnerConfig
from engine.commands.replay import CannotGoOn, Place, alone, before, begun, first_difference, main, recorded
from engine.console.options import parse
from engine.errors import BadInput
from recipes.quickstart import Config
from recipes.tiny.task import SHIPPED
from tests.support.paths import ROOT
from tests.support.recorded_run import write_recorded_run


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # loading a recipe puts its folder there
    write_recorded_run(tmp_path)
    return tmp_path


PLACE = Place(step=1, group=1, sample=0, turn=1)


def test_the_turns_before_are_taken_over_token_by_token_and_those_after_are_not(run):
    trajectory = recorded(run, PLACE)
    assert len(trajectory.turns) == 2
    piece = before(trajectory, 1)
    end = trajectory.turns[0].end
    assert piece.token_ids_T.tolist() == trajectory.token_ids_T[:end].tolist()
    assert piece.sampled_T[-1]
    assert piece.turns == trajectory.turns[:1]
    assert piece.turns[0].tool_uses
    assert before(trajectory, 0) is None


def test_the_first_token_that_differs_is_found_also_at_the_end(run):
    one = recorded(run, PLACE)
    assert first_difference(one, one) is None
    changed = one.token_ids_T.copy()
    changed[7] += 1
    assert first_difference(one, replace(one, token_ids_T=changed)) == 7
    size = len(one.token_ids_T)
    assert first_difference(one, replace(one, token_ids_T=one.token_ids_T[:-1])) == size - 1


@pytest.mark.parametrize(
    ("changes", "named"), [({"step": 99}, "99"), ({"group": 99}, "99"), ({"sample": 99}, "99"), ({"turn": 99}, "99")]
)
def test_what_was_not_recorded_is_named(run, changes, named):
    with pytest.raises((BadInput, CannotGoOn), match=named):
        recorded(run, replace(PLACE, **changes))


def begin(run, recipe, *options):
    (run / "config.json").write_text(json.dumps({"recipe": str(recipe), "options": options, "directory": str(ROOT)}))


def test_the_recipe_and_its_options_are_those_of_the_run(run):
    begin(run, "recipes/quickstart.py", "seed=7", "rollout.max_tokens=300")
    ran = begun(run)
    assert ran.recipe.file == ROOT / "recipes" / "quickstart.py"
    training = parse(ran.recipe.config, ran.options).training()
    assert (training.seed, training.rollout.max_tokens) == (7, 300)
    begin(run, "gone.py")
    with pytest.raises(CannotGoOn, match=r"gone\.py"):
        begun(run)


def test_a_recipe_imports_what_lies_beside_it(run, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "beside_a_replay.py").write_text("from recipes.quickstart import recipe\n")
    (folder / "mine.py").write_text("from beside_a_replay import recipe\n")
    begin(run, folder / "mine.py")
    assert begun(run, folder / "mine.py").recipe.config is Config


def test_a_file_without_a_recipe_is_named(run, tmp_path):
    (tmp_path / "empty.py").write_text("")
    begin(run, "recipes/quickstart.py")
    with pytest.raises(CannotGoOn, match=r"empty\.py"):
        begun(run, tmp_path / "empty.py")


def test_one_replica_has_the_weights_that_are_asked_for_and_no_adapter(tmp_path):
    config = Config(adapters=True, learner=LearnerConfig(lora_rank=8), replicas=2, max_staleness=1).training()
    one = alone(config, SHIPPED, seed=None)
    assert (one.devices.replicas, one.devices.adapters, one.replicas_config.weight_transfer) == (1, False, "shm")
    assert one.seed == config.seed
    assert alone(config, SHIPPED, seed=5).seed == 5


@pytest.mark.parametrize("by", ["its path", "a relative path", "a link"])
def test_a_recipe_that_comes_with_the_run_is_named_and_not_run(run, tmp_path, by):
    ran, theirs, link = tmp_path / "ran", tmp_path / "theirs.py", tmp_path / "quickstart.py"
    theirs.write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nraise SystemExit")
    link.symlink_to(theirs)
    name = {"its path": str(theirs), "a relative path": os.path.relpath(theirs, ROOT), "a link": str(link)}[by]
    begin(run, name)
    with pytest.raises(CannotGoOn, match=r"theirs\.py.*recipe=FILE"):
        begun(run)
    assert not ran.exists()
    with pytest.raises(SystemExit):  # asked for by name
        begun(run, theirs)
    assert ran.exists()


def test_only_recipes_of_the_checkout_run_unasked(run):
    begin(run, "tests/support/limited_runs.py")
    with pytest.raises(CannotGoOn, match="limited_runs"):
        begun(run)


def test_a_run_without_weights_of_its_own_is_named_in_one_line(run, capsys):
    begin(run, "recipes/quickstart.py")
    words = ["step=1", "group=1", "sample=0", "turn=1"]
    assert main([str(run), *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "checkpoint" in line
