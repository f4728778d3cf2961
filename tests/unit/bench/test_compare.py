"""Whether two runs differ: said rightly in nine of ten cases, and never of what cannot be compared."""

import json

import numpy as np
import pytest

from bench.__main__ import BENCHES, main
from bench.commands import compare
from bench.commands.sweep import combinations, pareto
from bench.measuring.disturbance import reason
from bench.measuring.figures import QUESTIONS
from bench.measuring.report import RUN, Gate, finish, interruptible, own_options

ROUNDS, TRIES = 7, 200
NOISE, DRIFT = 0.02, 0.10  # of a round, and of the hour, which concerns both checkouts of a round


def rounds(rng, change=1.0):
    """Seconds of two checkouts, round by round in turns; the second one takes `change` times as long."""
    hour = np.exp(rng.normal(0, DRIFT, ROUNDS))
    a, b = (hour * np.exp(rng.normal(0, NOISE, ROUNDS)) for _ in range(2))
    return a.tolist(), (change * b).tolist()


@pytest.mark.parametrize(("change", "verdict"), [(1.0, "same"), (1.05, "B is larger"), (0.95, "B is smaller")])
def test_the_verdict_is_right_in_nine_of_ten_tries(change, verdict):
    rng = np.random.default_rng(0)
    verdicts = [compare.difference("s", *rounds(rng, change), paired=True).verdict for _ in range(TRIES)]
    assert verdicts.count(verdict) >= 0.9 * TRIES


def test_what_is_not_paired_is_judged_by_the_spread_of_both():
    rng = np.random.default_rng(1)
    verdicts = [compare.difference("s", *rounds(rng, 1.05), paired=False).verdict for _ in range(TRIES)]
    assert verdicts.count("same") > 0.8 * TRIES, "the hour hides 5 % where rounds are not in turns"
    quiet = [np.exp(rng.normal(mean, NOISE, ROUNDS)).tolist() for mean in (0.0, 0.1)]
    assert compare.difference("s", *quiet, paired=False).verdict == "B is larger"


def table(rng, figures, changed=1.0):
    """Verdicts of a table whose first figure takes `changed` times as long, and in which nothing else has changed."""
    a, b = ({f"figure {n}": np.exp(rng.normal(0, NOISE, ROUNDS)) for n in range(figures)} for _ in range(2))
    b["figure 0"] = changed * b["figure 0"]
    return [found.verdict for found in compare.differences(a_result(**a), a_result(**b), paired=True)]


def test_chance_makes_no_verdict_in_nineteen_tables_of_twenty():
    rng = np.random.default_rng(3)
    tables = [table(rng, figures=20) for _ in range(TRIES)]
    assert sum(any(verdict.startswith("B is") for verdict in verdicts) for verdicts in tables) <= 0.06 * TRIES
    assert sum("unsure" in verdicts for verdicts in tables) > 0.4 * TRIES, "their own intervals leave 1 out"
    assert [table(rng, figures=20, changed=1.2)[0] for _ in range(20)].count("B is larger") >= 18


def test_two_files_are_compared_with_the_word_that_their_rounds_were_not_in_turns(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(a_result(step_s=[1.0, 1.1, 1.2])))
    assert main(["compare", str(path), str(path)]) == 0
    printed = capsys.readouterr()
    assert "in turns" in printed.out + printed.err
    assert "compare step --other DIR" in printed.out + printed.err


def a_result(**samples):
    return {"bench": "step", "samples": samples}


def test_only_figures_with_enough_rounds_in_both_are_compared():
    a = a_result(step_s=[1.0, 1.1, 1.2], short=[1.0, 2.0], zero=[0.0, 1.0, 1.0], mine=[1.0] * 3)
    b = a_result(step_s=[1.0, 1.1, 1.2], short=[1.0, 2.0], zero=[0.0, 1.0, 1.0])
    [found] = compare.differences(a, b, paired=False)
    assert found.metric == "step_s"
    with pytest.raises(ValueError, match="short"):
        compare.differences(a, b, paired=False, metric="short")
    with pytest.raises(ValueError, match="learner"):
        compare.differences(a, {**b, "bench": "learner"}, paired=False)


def test_the_gate_is_shut_only_by_what_is_surely_worse():
    base = a_result(step_s=[1.0, 1.01, 0.99, 1.0])
    for factor, most, code in ((1.0, 0.05, 0), (1.2, 0.05, 1), (1.04, 0.05, 0), (0.8, -0.05, 1), (1.2, -0.05, 0)):
        result = a_result(step_s=[factor * value for value in base["samples"]["step_s"]])
        assert compare.gate(base, result, metric="step_s", most=most) == code, (factor, most)


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_file_that_is_no_result_is_named(content, tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(content)
    assert main(["compare", str(path), str(path)]) == 2
    assert "a.json" in capsys.readouterr().err


def test_options_of_the_shell_are_taken_out_of_those_of_the_bench(tmp_path):
    base = tmp_path / "base.json"
    base.write_text("{}")
    gate, further = own_options(["--rounds", "5", "--baseline", str(base), "--metric", "step_s", "--gate", "3%", "a=1"])
    assert gate == Gate(baseline=base, metric="step_s", most=0.03)
    assert further == ["--rounds", "5", "a=1"]
    for words in (["--baseline", str(base)], ["--baseline", "nowhere", "--metric", "x"], ["--gate", "much"]):
        with pytest.raises(ValueError, match="--"):
            own_options(words)


def test_every_bench_has_a_question_and_an_unknown_one_is_named(capsys):
    assert BENCHES.keys() <= QUESTIONS.keys()
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in BENCHES)
    assert main(["lerner"]) == 2
    assert "lerner" in capsys.readouterr().err


def finished(count, capsys, tmp_path, monkeypatch, others=0.0):
    monkeypatch.chdir(tmp_path)
    RUN.begin("step", [])
    monkeypatch.setattr(RUN.surroundings, "others", lambda: others)
    found = []

    def show():
        metrics = {"step_s": sum(found) / len(found)}
        finish("step", "t", ["what", "ratio"], [["a", "1.5"]], config={}, metrics=metrics, environment={})

    interruptible(lambda: found.extend(range(1, count + 1)), show, found)
    RUN.begin("", [])
    printed = capsys.readouterr().out
    return printed, json.loads((tmp_path / "runs/bench/step.json").read_text())


def test_each_round_is_a_sample(capsys, tmp_path, monkeypatch):
    printed, result = finished(4, capsys, tmp_path, monkeypatch)
    assert result["samples"] == {"step_s": [1.0, 2.0, 3.0, 4.0]}
    assert result["metrics"] == {"step_s": 2.5}
    assert "1.5" in printed
    assert "disturbed" not in result
    assert len([line for line in printed.splitlines() if line.startswith("{")]) == 1


def test_few_rounds_and_a_busy_machine_have_no_ratio(capsys, tmp_path, monkeypatch):
    printed, result = finished(2, capsys, tmp_path, monkeypatch)
    assert "1.5" not in printed.partition("{")[0]
    assert "rounds" in result["disturbed"]
    printed, result = finished(4, capsys, tmp_path, monkeypatch, others=0.3)
    assert "1.5" not in printed.partition("{")[0]
    assert "30 %" in result["disturbed"]
    assert reason(0.05, None) is None


def test_a_sweep_is_every_combination_and_its_line_what_can_be_had():
    assert len(combinations(["a=1,2", "b=x,y,z"])) == 6
    for wrong in ("a", "a=", "=1"):
        with pytest.raises(ValueError, match="--over"):
            combinations([wrong])
    assert pareto([(1, 1), (3, 0), (2, 2), (0, 2)]) == [2, 1]
