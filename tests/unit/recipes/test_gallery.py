"""The gallery of recipes/README.md: a line, code of its own and a picture for every recipe, from runs that are kept."""

import json
import re
import textwrap

import pytest

from recipes.gallery import draw
from tests.support.gallery import RECIPES
from tests.support.paths import ROOT

PAGE = (ROOT / "recipes" / "README.md").read_text()
SCREEN = 25  # lines


def test_recipes_are_looked_for_where_they_are():
    assert {"quickstart.py", "rstar2/rl.py", "agents/program.py"} <= set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_in_the_gallery(recipe):
    heads = re.findall(rf"^### {re.escape(recipe)}\n(.*?)(?=^##)", PAGE, re.DOTALL | re.MULTILINE)
    assert heads, f"recipes/{recipe} is not in recipes/README.md. Fix: add a section `### {recipe}` to the gallery"
    [section] = heads
    assert f"]({recipe})" in section
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(code.splitlines()) <= SCREEN
    source = textwrap.dedent((ROOT / "recipes" / recipe).read_text()).splitlines()
    assert {line.strip() for line in code.splitlines()} <= {line.strip() for line in source}, "it is the recipe's own"
    [picture] = re.findall(r"!\[.+\]\((\S+\.png)\)", section)
    assert (ROOT / "recipes" / picture).is_file()
    if picture.startswith("gallery/"):
        runs = json.loads((draw.HERE / "runs.json").read_text())
        assert runs[picture.removeprefix("gallery/").removesuffix(".png")]["recipe"] == f"recipes/{recipe}"


async def test_a_picture_is_drawn_of_a_run(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    options = ["steps=2"]
    (run / "config.json").write_text(json.dumps({"recipe": "recipes/mine.py", "options": options}))
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "reward": 0.25}\n{"step": 2, "reward": 0.5, "eval/accuracy": 1.0}\n'
    )
    await draw.draw(draw.Config(run=run, folder=tmp_path))
    kept = json.loads((tmp_path / "runs.json").read_text())["mine"]
    assert kept["series"] == {"reward": [[1, 0.25], [2, 0.5]], "eval/accuracy": [[2, 1.0]]}
    assert kept["options"] == options
    assert (tmp_path / "mine.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("given", "told"), [({"run": "nowhere"}, "nowhere"), ({"metrics": ("odd",)}, "odd")])
async def test_a_run_that_cannot_be_drawn_is_named(given, told, tmp_path):
    (tmp_path / "config.json").write_text('{"recipe": "recipes/mine.py", "options": []}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.25}\n')
    run = tmp_path / given.get("run", "")
    with pytest.raises(draw.BadInput, match=told):
        await draw.draw(draw.Config(run=run, metrics=given.get("metrics", ("reward",)), folder=tmp_path))
