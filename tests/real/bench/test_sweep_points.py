"""Points of a sweep are kept, and measured again only where they have to be; a program stands in for a recipe."""

import pytest

from bench.__main__ import main
from bench.commands import sweep
from bench.commands.sweep import Options, key
from bench.measuring.result import Result
from engine.console.options import parse
from tests.support.bench_results import a_result

RECIPE = """
import json, sys
from pathlib import Path

given = dict(word.split("=") for word in sys.argv[1:])
log = Path(sys.argv[0]).with_name("asked.txt")
log.write_text((log.read_text() if log.exists() else "") + given["slots"] + "\\n")
if given["slots"] == "0":
    sys.exit(3)
folder = Path(given["runs"]) / given["name"]
folder.mkdir(parents=True, exist_ok=True)
rows = [{"step": n, "time/step_s": float(given["slots"]), "tokens/generated": 8, "reward": 0.5} for n in range(1, 5)]
rows += [{"step": 4, "eval/accuracy": 0.95, "time/train_total_s": 9.0}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(RECIPE)
    return tmp_path


def asked(recipe):
    return (recipe / "asked.txt").read_text().split()


def test_a_point_that_failed_is_measured_again_and_the_others_are_kept(recipe, capfd):
    command = ["sweep", "mine.py", "over=slots:1,0,2"]
    assert main(command) == 1
    shown = capfd.readouterr()
    assert "exit code 3" in shown.err
    assert "1.00 s" in shown.out
    assert "2.00 s" in shown.out
    assert main(command) == 1
    assert asked(recipe) == ["1", "0", "2", "0"], "the points that ended are kept"
    assert main([*command, "fresh=true"]) == 1
    assert asked(recipe)[4:] == ["1", "0", "2"]
    capfd.readouterr()


def test_a_point_is_another_one_with_other_options_or_another_recipe(recipe):
    options = parse(Options, ["mine.py", "over=slots:1,2"])
    first = key(options, ["slots=1"])
    assert first != key(options, ["slots=2"])
    (recipe / "mine.py").write_text(RECIPE + "# changed")
    assert first != key(options, ["slots=1"])


def test_a_point_of_a_bench_is_its_result(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made = a_result(step_s=[1.0, 2.0, 3.0])

    def run(command, **_):
        assert command[1:5] == ["-m", "bench", "step", "rounds=3"]
        [json_field] = [word for word in command if word.startswith("json=")]
        made.write(sweep.Path(json_field.removeprefix("json=")))

    monkeypatch.setattr(sweep, "measured", run)
    assert main(["sweep", "step", "over=steps:8", "rounds=3"]) == 0
    assert "2.00 s" in capsys.readouterr().out
    [kept] = (tmp_path / "runs/bench/sweep").glob("*.json")
    assert Result.read(kept) == made
