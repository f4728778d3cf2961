"""The command `rocstar`: its overview and its commands."""

import re
import sys

import pytest

from engine.programs.rocstar import COMMANDS, start
from tests.support.paths import ROOT

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


IN_A_BLOCK = re.compile(r"^ *(?:\w+=\S+ )?(?:\.venv/bin/)?rocstar (\S.*?)(?: +#.*)?$", re.MULTILINE)
IN_A_SENTENCE = re.compile(r"`(?:\.venv/bin/)?rocstar ([^`]+)`")


def typed():
    """Yields every command in the pages."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("[a-z]*/*.md"), *ROOT.glob("recipes/*/*.md")):
        parts = page.read_text().split("```")  # sentences and blocks by turns
        for sentences in parts[::2]:
            yield from IN_A_SENTENCE.findall(sentences)
        for block in parts[1::2]:
            yield from IN_A_BLOCK.findall(block)


TYPED = sorted(set(typed()))


@pytest.mark.parametrize("line", TYPED)
def test_the_commands_of_the_pages_have_these_options(line, capsys):
    name, *arguments = line.split()
    assert name in COMMANDS
    if name in ("run", "node", "bench"):  # which take options of others
        return
    with pytest.raises(SystemExit):
        start([name, "--help"])
    shown = capsys.readouterr().out
    for field in [argument.partition("=")[0] for argument in arguments if "=" in argument]:
        assert f"  {field}: " in shown or f".{field}: " in shown


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
