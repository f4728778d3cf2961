"""What every bench does the same way: its options, Ctrl-C, its last line, the programs that it runs."""

import json
import sys
from pathlib import Path

import pytest

from bench.benches import mismatch, step, weights
from bench.benches.fleet import fleet
from bench.benches.learner import learner
from bench.benches.rollout import rollout
from bench.benches.sandbox import sandbox
from bench.benches.sim_fleet import sim_fleet
from bench.benches.streaming import streaming
from bench.measuring import figures
from bench.measuring.report import drawn, finish, interruptible


@pytest.mark.parametrize(
    ("bench", "given", "wanted"),
    [
        (fleet, "--groups 3", 3),
        (mismatch, "--trajectories 4", 4),
        (rollout, "--trajectories 32", 32),
        (sandbox, "--burst 7", 7),
        (sim_fleet, "--replicas 3,4", [3, 4]),
        (step, "--steps 20", 20),
        (streaming, "--trajectories 4", 4),
        (weights, "--sizes 97m", ["97m"]),
    ],
)
def test_quick_changes_only_what_was_not_given(bench, given, wanted):
    option, value = given.split()
    quick, full = bench.arguments(["--quick"]), bench.arguments([])
    name = option.removeprefix("--")
    assert getattr(bench.arguments([option, value, "--quick"]), name) == wanted
    assert getattr(bench.arguments([option, value]), name) == wanted
    assert getattr(quick, name) != getattr(full, name)


@pytest.mark.parametrize(
    ("bench", "given", "said"),
    [
        (fleet, "--seeds 111,104", "argument --seeds: 104: there is no"),
        (fleet, "--seeds x", "argument --seeds: 'x' is not a whole number of at least 0"),
        (fleet, "--deadline-s nan", "argument --deadline-s: nan is not a number of at least 1"),
        (fleet, "--record /dev/null/steps", "argument --record: [Errno"),
        (fleet, "--checkpoint nowhere", "argument --checkpoint: there is no file nowhere/config.json"),
        (mismatch, "--checkpoint nowhere", "argument --checkpoint: there is no file nowhere/config.json"),
        (rollout, "--trajectories 8", "argument --trajectories: '8' is not a whole number of at least 16"),
        (rollout, "--queued 8", "argument --queued: 8 is not a multiple of 16"),
        (rollout, "--profile /dev/null/profile", "argument --profile: [Errno"),
        (sandbox, "--seconds 0", "argument --seconds: 0 is not a number of at least 0.01"),
        (sandbox, "--only call", "argument --only: call: it knows calls, latency"),
        (sandbox, "--peer-url http://127.0.0.1", "--peer-url must be judge=http://"),
        (sim_fleet, "--seeds 1,x", "argument --seeds: 'x' is not a whole number of at least 0"),
        (sim_fleet, "--kv nan", "argument --kv: nan is not a number of at least 0.001"),
        (sim_fleet, "--offload inf", "argument --offload: inf is not a number of at least 0"),
        (sim_fleet, "--calibrate nowhere", "argument --calibrate: there is no file nowhere"),
        (sim_fleet, "--trace .", "argument --trace: there is no file ."),
        (step, "--staleness 0,-1", "argument --staleness: '-1' is not a whole number of at least 0"),
        (step, "--steps 4", "argument --steps: '4' is not a whole number of at least 5"),
        (streaming, "--turns 1", "argument --turns: '1' is not a whole number of at least 2"),
        (weights, "--sizes 98m", "argument --sizes: 98m: it knows tiny, 97m, 600m"),
    ],
)
def test_a_wrong_value_is_named_before_anything_starts(bench, given, said, capsys):
    with pytest.raises(SystemExit):
        bench.arguments(given.split())
    assert said in capsys.readouterr().err


@pytest.mark.skipif(learner.torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit):
        learner.arguments(["--device", "cuda"])
    assert "argument --device: PyTorch finds no GPU" in capsys.readouterr().err


def test_a_file_that_is_to_be_written_keeps_what_it_holds_so_far(tmp_path):
    (tmp_path / "steps").write_text("earlier\n")
    assert fleet.arguments(["--record", str(tmp_path / "steps")]).record.read_text() == "earlier\n"


def test_figures_survive_a_folder_that_cannot_be_written(tmp_path):
    assert drawn(tmp_path / "runs" / "a.png", Path.touch) == str(tmp_path / "runs" / "a.png")
    assert drawn(Path("/dev/null/bench/a.png"), Path.touch).startswith("none, [Errno")


def test_fields_of_the_quick_start_may_stand_anywhere():
    options = step.arguments(["seed=3", "--quick", "replicas=1"])
    assert (options.fields, options.steps) == (["seed=3", "replicas=1"], 8)


@pytest.mark.parametrize("rounds", [0, 2])
def test_ctrl_c_shows_what_whole_rounds_give(rounds, capsys, monkeypatch):
    monkeypatch.setattr("bench.measuring.report.exit_process", sys.exit)  # which would end this process
    whole, shown = [], []

    def measure():
        whole.extend(range(rounds))
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        interruptible(measure, lambda: shown.extend(whole), whole)
    assert ended.value.code == 130
    assert shown == list(range(rounds))
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("interrupted")


def test_the_last_line_has_what_was_given_and_the_load_around(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {"rounds": 5, "groups": None, "record": Path("steps.jsonl")}
    finish("bench", "title", ["a"], [["1"]], config=config, metrics={"x": 1.5}, environment={"load_before": 0.1})
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["config"] == {"rounds": 5, "groups": None, "record": "steps.jsonl"}
    assert line["metrics"] == {"x": 1.5}
    assert line["environment"].keys() == {"load_before", "load_after", "others"}
    kept = json.loads((tmp_path / "runs/bench/bench.json").read_text())
    assert line.items() <= kept.items()
    assert kept["tables"] == [{"title": "title", "header": ["a"], "rows": [["1"]]}]


def test_the_page_of_figures_is_what_its_results_give():
    assert (figures.FOLDER / "README.md").read_text() == figures.page(figures.load(figures.FOLDER / "results"))


RESULT = {
    "bench": "learner",
    "machine": "2 cores of a test",
    "date": "2026-01-02",
    "command": "python -m bench learner --quick",
    "tables": [{"title": "Speed", "header": ["part", "ms"], "rows": [["a|b", "1.5"]]}],
}


def test_a_section_has_question_command_machine_date_and_table():
    page = figures.page([RESULT])
    for part in ("## learner", figures.QUESTIONS["learner"], RESULT["command"], RESULT["machine"], RESULT["date"]):
        assert part in page
    assert "| a\\|b | 1.5 |" in page


def test_figures_without_a_run_of_their_own_name_their_source():
    page = figures.page([{**RESULT, "date": None, "source": "README at abc1234"}])
    assert "README at abc1234" in page


@pytest.mark.parametrize(
    ("changes", "named"), [({"machine": ""}, "machine"), ({"date": None}, "date"), ({"bench": "lerner"}, "lerner")]
)
def test_a_result_that_lacks_something_is_named(changes, named, tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(RESULT | changes))
    with pytest.raises(ValueError, match=f"one.json.*{named}"):
        figures.load(tmp_path)
