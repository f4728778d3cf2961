"""What every bench does the same way: its options, Ctrl-C, its rounds, its last line, its page."""

import doctest
import importlib
import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from bench import ROOT
from bench.__main__ import main
from bench.catalogue import CATALOGUE
from bench.measuring import questions
from bench.measuring import run as shell
from bench.measuring.bench import Bench, BenchFailed
from bench.measuring.disturbance import reason
from bench.measuring.metric import count, ratio, seconds
from bench.measuring.page import PAGE, RESULTS, load, page
from bench.measuring.questions import ANSWERS, MOST_S, QUESTIONS
from bench.measuring.result import Result, summarised, tables
from bench.measuring.terminal import written
from engine.console.options import flat, parse
from tests.support.bench_results import a_result


@pytest.fixture
def around(tmp_path, monkeypatch):
    """A folder of its own, and a machine that nobody else uses unless a test says so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shell.Surroundings, "others", lambda self: 0.0)
    monkeypatch.setattr(shell, "commit", lambda: "abc1234")  # no git here
    return tmp_path


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: int = 4
    steps: int = 8
    checkpoint: Path = ROOT / "recipes"


METRICS = {"step_s": seconds("step", ""), "over": ratio("over", ""), "lost": count("lost", "", summary="largest")}


def a_bench(measure=None, **given):
    def measured(options, keep):
        for number in range(1, options.rounds + 1):
            keep({"a": {"step_s": number, "over": 7.25, "lost": number}, "b": {"step_s": 1, "over": 8.5, "lost": 0}})

    return Bench(options=Options, metrics=METRICS, measure=measure or measured, headline=("step_s",), **given)


def result_of(printed):
    [line] = [line for line in printed.splitlines() if line.startswith("{")]
    return json.loads(line)


def test_each_round_is_a_sample_of_each_case(around, capsys):
    assert shell.run("step", a_bench(), ["json=kept.json"], doc="") == 0
    line = result_of(capsys.readouterr().out)
    assert line["samples"]["a"]["step_s"] == [1.0, 2.0, 3.0, 4.0]
    assert line["figures"]["a"] == {"step_s": 2.5, "over": 7.25, "lost": 4.0}
    assert (line["rounds"], line["config"]) == (4, {"rounds": 4, "steps": 8, "checkpoint": "recipes"})
    for path in (around / "runs/bench/step.json", around / "kept.json"):
        assert Result.read(path).flat()["a/step_s"] == [1.0, 2.0, 3.0, 4.0]
    assert (around / "runs/bench/step.png").read_bytes().startswith(b"\x89PNG")


def test_quick_changes_only_what_was_not_given(around, capsys):
    bench = a_bench(quick={"rounds": "1", "steps": "2"})
    assert shell.run("step", bench, ["quick=true", "rounds=3"], doc="") == 0
    assert result_of(capsys.readouterr().out)["config"].items() >= {"rounds": 3, "steps": 2}.items()


def test_few_rounds_and_a_busy_machine_have_no_ratio(around, capsys, monkeypatch):
    shell.run("step", a_bench(), ["rounds=2"], doc="")
    printed = capsys.readouterr().out
    assert "7.25" not in printed.partition("{")[0]
    assert "rounds" in result_of(printed)["disturbed"]
    monkeypatch.setattr(shell.Surroundings, "others", lambda self: 0.3)
    shell.run("step", a_bench(), [], doc="")
    printed = capsys.readouterr().out
    assert "7.25" not in printed.partition("{")[0]
    assert "30 %" in result_of(printed)["disturbed"]
    shell.run("step", a_bench(simulated=True), [], doc="")
    assert "7.25" in capsys.readouterr().out, "what is simulated nobody disturbs"
    assert reason(0.05, 3) is None


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (BenchFailed("it is lost"), 1), (RuntimeError("a bug"), 1)]
)
@pytest.mark.parametrize("rounds", [0, 2])
def test_an_end_in_the_middle_shows_what_whole_rounds_give(error, code, rounds, around, capsys):
    def measure(options, keep):
        for _ in range(rounds):
            keep({"": {"step_s": 1.0}})
        raise error

    assert shell.run("step", a_bench(measure), [], doc="") == code
    printed = capsys.readouterr()
    assert printed.err
    assert bool(printed.out) == bool(rounds)


def steps_of(*seconds):
    def measure(options, keep):
        for step_s in seconds:
            keep({"": {"step_s": step_s}})

    return measure


@pytest.fixture
def base(around, capsys):
    """A baseline that the bench left on this machine."""
    assert shell.run("step", a_bench(steps_of(0.5, 0.51, 0.52)), ["json=base.json"], doc="") == 0
    capsys.readouterr()
    return Path("base.json")


def test_the_gate_is_the_exit_code(base, capsys):
    slower, gate = a_bench(steps_of(1.0, 1.01, 1.02)), [f"baseline={base}", "metric=step_s"]
    assert shell.run("step", slower, [*gate, "gate=5"], doc="") == 1
    assert shell.run("step", slower, [*gate, "gate=200"], doc="") == 0
    capsys.readouterr()


def never(options, keep):
    raise AssertionError("nothing runs where the gate cannot judge")


@pytest.mark.parametrize(
    ("change", "fields", "named"),
    [
        ({"bench": "learner"}, [], "learner"),
        ({"disturbed": "other processes used 95 % of the CPU"}, [], "95 %"),
        ({"environment": a_result(cpu="another").environment}, [], "another"),
        ({}, ["steps=9"], "steps is 8 in A, 9 in B"),
        ({}, ["rounds=2"], "rounds is 2"),
    ],
)
def test_a_baseline_that_cannot_judge_is_refused_before_anything_runs(change, fields, named, base):
    msgspec.structs.replace(Result.read(base), **change).write(base)
    gate = [f"baseline={base}", "metric=step_s", *fields]
    with pytest.raises(ValueError, match=named):
        shell.run("step", a_bench(never), gate, doc="")


def test_a_disturbed_run_is_not_judged(base, monkeypatch, capsys):
    monkeypatch.setattr(shell.Surroundings, "others", lambda self: 0.3)
    with pytest.raises(ValueError, match="30 %"):
        shell.run("step", a_bench(steps_of(1.0, 1.01, 1.02)), [f"baseline={base}", "metric=step_s"], doc="")
    capsys.readouterr()


def test_the_short_form_does_not_replace_the_result_of_the_whole(around, capsys):
    for argument in ([], ["quick=true"]):
        assert shell.run("step", a_bench(quick={"steps": "2"}), argument, doc="") == 0
    capsys.readouterr()
    assert Result.read(around / "runs/bench/step.json").config["steps"] == 8
    quick = Result.read(around / "runs/bench/step.quick.json")
    assert quick.config["steps"] == 2
    assert quick.wall_s is not None


def test_figures_survive_a_folder_that_cannot_be_written(tmp_path):
    assert written(tmp_path / "runs" / "a.png", Path.touch) == str(tmp_path / "runs" / "a.png")
    assert written(Path("/dev/null/bench/a.png"), Path.touch).startswith("not written")


def test_a_case_alone_is_listed():
    [table] = tables(a_result(step_s=[1.0], lost=[2.0]))
    assert table.rows == [["step_s", "1.00 s"], ["lost", "2.00 s"]]


def test_a_case_that_lacks_a_metric_shares_the_table_of_the_others():
    result = a_result(step_s=[1.0], lost=[2.0], other=[3.0])
    both = {"step_s": 1.0, "lost": 2.0}
    figures = {"less": {"lost": 2.0}, "all": both, "none of them": {"other": 3.0}}
    first, second = tables(msgspec.structs.replace(result, figures=figures))
    assert first.rows == [["less", "", "2.00 s"], ["all", "1.00 s", "2.00 s"]]
    assert second.rows == [["other", "3.00 s"]]


def test_a_table_of_many_metrics_and_few_cases_has_the_metrics_as_rows():
    result = a_result(**{f"m{n}": [float(n)] for n in range(13)})
    figures = {case: dict.fromkeys(result.metrics, 1.0) for case in ("a", "b")}
    [table] = tables(msgspec.structs.replace(result, figures=figures))
    assert table.header == ["", "a", "b"]
    assert table.rows[3] == ["m3", "1.00 s", "1.00 s"]


def test_an_unknown_bench_is_named_and_the_known_are_listed(capsys):
    assert main(["lerner"]) == 2
    assert "lerner" in capsys.readouterr().err
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in CATALOGUE)


WITH_ROUNDS = [name for name in CATALOGUE if name not in ("gpu", "sim_live")]


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_bench_of_the_catalogue_says_what_it_does_and_has_a_short_form(name):
    module = CATALOGUE[name].load()
    bench = module.BENCH
    assert module.__doc__
    assert bench.metrics
    if name != "sim_live":  # it needs a record
        quick = parse(bench.options, [f"{field}={value}" for field, value in bench.quick.items()])
        assert flat(quick) != flat(bench.options())


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_bench_has_headline_figures_and_a_kept_result_has_rounds_of_the_first(name):
    """Else neither a comparison, a gate nor a sweep could say anything of it."""
    bench = CATALOGUE[name].load().BENCH
    assert bench.headline
    assert set(bench.headline) <= bench.metrics.keys()
    for result in (kept for kept in load(RESULTS).values() if kept.bench == name):
        rounds = [len(of[bench.headline[0]]) for of in result.samples.values() if bench.headline[0] in of]
        assert min(rounds) >= 3


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_a_bench_has_at_least_three_rounds_by_default(name):
    assert CATALOGUE[name].load().BENCH.options().rounds >= 3


@pytest.mark.parametrize(
    ("bench", "field", "value"),
    [
        ("fleet", "checkpoint", Path("nowhere")),
        ("learner", "context", 8),
        ("mismatch", "checkpoint", Path("nowhere")),
        ("rollout", "trajectories", 8),
        ("rollout", "queued", 8),
        ("sandbox", "seconds", 0.0),
        ("sandbox", "peer_urls", ("http://127.0.0.1",)),
        ("sim_fleet", "kv", 0.0),
        ("sim_fleet", "trace", Path("nowhere")),
        ("step", "staleness", (0, -1)),
        ("step", "steps", 4),
        ("streaming", "turns", 1),
        ("gpu", "parts", ("dance",)),
    ],
)
def test_a_wrong_value_is_named_before_anything_starts(bench, field, value):
    with pytest.raises(ValueError, match=field):
        CATALOGUE[bench].load().BENCH.options(**{field: value})


def test_fields_of_the_quick_start_may_stand_among_a_benchs_own():
    options = parse(CATALOGUE["step"].load().BENCH.options, ["seed=3", "rounds=1", "replicas=1"])
    assert (options.fields, options.rounds) == (("seed=3", "replicas=1"), 1)


def test_the_page_is_what_the_results_give():
    assert PAGE.read_text() == page(load(RESULTS), questions.load(ANSWERS))


def test_the_figures_of_a_kept_result_are_those_of_its_rounds():
    results = load(RESULTS)
    assert results
    for result in results.values():
        assert summarised(result.samples, result.metrics) == result.figures


def test_a_section_has_question_command_machine_date_table_and_its_json():
    text = page({"step": a_result(step_s=[1.0, 2.0, 3.0])}, {})
    for part in (CATALOGUE["step"].question, "rocstar bench step", "2026-01-02", "abc1234", "results/step.json"):
        assert part in text
    assert "| step_s | 2.00 s |" in text
    assert "the doc of step_s" in text


def test_a_result_that_is_not_named_after_its_bench_is_refused(tmp_path):
    a_result(step_s=[1.0]).write(tmp_path / "other.json")
    with pytest.raises(ValueError, match=r"other\.json"):
        load(tmp_path)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_is_answered_within_ten_minutes_and_has_a_picture(name):
    answer = questions.load(ANSWERS)[name]
    assert answer.printed
    assert answer.wall_s < MOST_S
    picture = QUESTIONS[name].picture
    path = ANSWERS / f"{name}.png" if picture.startswith("runs/") else ROOT / picture
    assert path.read_bytes().startswith(b"\x89PNG")


EXAMPLES = [
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for path in sorted((ROOT / "bench").rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("module", EXAMPLES)
def test_the_examples_in_docstrings_work(module):
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert (failed, tried > 0) == (0, True)
