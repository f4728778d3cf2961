"""The command `rocstar`: its overview and its commands."""

import sys

import pytest

from engine.programs.rocstar import COMMANDS, start

RECIPE = """
from dataclasses import dataclass
from engine.recipe import Recipe
from beside import told

@dataclass(frozen=True)
class Config:
    steps: int = 1

async def train(config, run):
    pass

recipe = Recipe(config=Config, train=train, main=told)
"""


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_the_overview_has_every_command_and_fits_a_screen(argv, capsys):
    assert start(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_answers_help(name, capsys):
    try:
        code = start([name, "--help"])
    except SystemExit as end:
        code = end.code
    assert code == 0
    assert name in capsys.readouterr().out


def test_an_unknown_command_names_the_nearest(capsys):
    assert start(["veiw", "runs/quickstart"]) == 2
    line = capsys.readouterr().err
    assert "'veiw'" in line
    assert "'view'" in line
    assert line.count("\n") == 1


def test_a_recipe_is_run_with_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rocstar"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "mine.py"
    path.write_text(RECIPE)
    (tmp_path / "beside.py").write_text("import sys\n\ndef told(argv):\n    return (sys.argv, argv)\n")
    assert start(["run", str(path), "steps=3", "--help"]) == ([str(path), "steps=3", "--help"], ["steps=3", "--help"])


@pytest.mark.parametrize("argv", [["nowhere.py"], ["steps=3"], []])
def test_what_is_no_recipe_ends_with_code_2_and_one_line(argv, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rocstar"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        code = start(["run", *argv])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert capsys.readouterr().err.count("\n") == 1
