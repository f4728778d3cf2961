"""Whether two results differ: said rightly in nine of ten cases, and never of what cannot be compared."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from bench import ROOT
from bench.__main__ import main
from bench.commands import compare
from bench.measuring import differences
from bench.measuring.comparable import obstacles
from tests.support.bench_results import a_result

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
    verdicts = [differences.difference("s", *rounds(rng, change), paired=True).verdict for _ in range(TRIES)]
    assert verdicts.count(verdict) >= 0.9 * TRIES


def test_what_is_not_paired_is_judged_by_the_spread_of_both():
    rng = np.random.default_rng(1)
    verdicts = [differences.difference("s", *rounds(rng, 1.05), paired=False).verdict for _ in range(TRIES)]
    assert verdicts.count("same") > 0.8 * TRIES, "the hour hides 5 % where rounds are not in turns"
    quiet = [np.exp(rng.normal(mean, NOISE, ROUNDS)).tolist() for mean in (0.0, 0.1)]
    assert differences.difference("s", *quiet, paired=False).verdict == "B is larger"


def table(rng, figures, changed=1.0):
    """Verdicts of a table whose first figure takes `changed` times as long, and in which nothing else has changed."""
    a, b = ({f"figure {n}": np.exp(rng.normal(0, NOISE, ROUNDS)) for n in range(figures)} for _ in range(2))
    b["figure 0"] = changed * b["figure 0"]
    return [each.verdict for each in differences.compared(a, b, paired=True)]


def test_chance_makes_no_verdict_in_nineteen_tables_of_twenty():
    rng = np.random.default_rng(3)
    tables = [table(rng, figures=20) for _ in range(TRIES)]
    assert sum(any(verdict.startswith("B is") for verdict in verdicts) for verdicts in tables) <= 0.06 * TRIES
    assert sum("unsure" in verdicts for verdicts in tables) > 0.4 * TRIES, "their own intervals leave 1 out"
    assert [table(rng, figures=20, changed=1.2)[0] for _ in range(20)].count("B is larger") >= 18


def test_only_figures_with_enough_rounds_in_both_are_compared():
    a = {"step_s": [1.0, 1.1, 1.2], "short": [1.0, 2.0], "zero": [0.0, 1.0, 1.0], "alone": [1.0] * 3}
    b = {"step_s": [1.0, 1.1, 1.2], "short": [1.0, 2.0], "zero": [0.0, 1.0, 1.0]}
    [compared] = differences.compared(a, b, paired=False)
    assert compared.metric == "step_s"
    with pytest.raises(ValueError, match="short"):
        differences.compared(a, b, paired=False, metric="short")


def test_the_gate_is_shut_only_by_what_is_surely_worse():
    samples = [1.0, 1.01, 0.99, 1.0]
    before = a_result(step_s=samples)
    for factor, most, code in ((1.0, 0.05, 0), (1.2, 0.05, 1), (1.04, 0.05, 0), (0.8, -0.05, 1), (1.2, -0.05, 0)):
        after = a_result(step_s=[factor * value for value in samples])
        assert differences.gate(before, after, metric="step_s", most=most) == code, (factor, most)


def test_a_baseline_without_the_metric_is_refused_before_anything_runs(tmp_path, capsys):
    path = tmp_path / "base.json"
    a_result(step_s=[1.0, 1.0]).write(path)
    assert main(["sim_fleet", f"baseline={path}", "metric=step_s"]) == 2
    assert "base.json" in capsys.readouterr().err


def test_two_files_are_compared_with_the_word_that_their_rounds_were_not_in_turns(tmp_path, capsys):
    path = tmp_path / "a.json"
    a_result(step_s=[1.0, 1.1, 1.2]).write(path)
    assert main(["compare", str(path), str(path)]) == 0
    printed = capsys.readouterr()
    assert "in turns" in printed.err
    assert "step_s" in printed.out


STEPS = [1.0, 1.1, 1.2]


@pytest.mark.parametrize(
    ("of_b", "named"),
    [
        ({"config": {"steps": 9}}, "steps is None in A, 9 in B"),
        ({"disturbed": "other processes used 95 % of the CPU"}, "95 %"),
        ({"cpu": "another"}, "another"),
    ],
)
def test_what_must_not_be_compared_is_compared_by_force_only(of_b, named, tmp_path, capsys):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    a_result(step_s=STEPS).write(paths[0])
    a_result(step_s=STEPS, **of_b).write(paths[1])
    assert main(["compare", *map(str, paths)]) == 2
    printed = capsys.readouterr()
    assert named in printed.err
    assert "step_s" not in printed.out
    assert main(["compare", *map(str, paths), "force=true"]) == 0
    printed = capsys.readouterr()
    assert named in printed.err
    assert "step_s" in printed.out


def test_the_number_of_rounds_may_differ():
    assert obstacles(a_result(config={"rounds": 3}, s=STEPS), a_result(config={"rounds": 5}, s=STEPS)) == []


@pytest.fixture
def checkouts(tmp_path, monkeypatch):
    """Two checkouts whose rounds are made up: `rounds` says what each gives, or how it ends."""
    monkeypatch.chdir(tmp_path)
    asked, rounds = [], []

    def measured(name, checkout, fields, kept):
        asked.append((checkout, fields))
        made = rounds.pop(0)
        if isinstance(made, BaseException):
            raise made
        made.write(kept)
        return made

    monkeypatch.setattr(compare, "measured", measured)
    return asked, rounds


def a_round(step_s, **given):
    return a_result(step_s=[step_s], **given)


def test_checkouts_are_compared_in_turns_with_a_seed_for_each_round(checkouts, capsys):
    asked, rounds = checkouts
    rounds += [a_round(step_s) for step_s in (1.0, 2.0, 2.1, 1.1, 1.2, 2.3)]
    assert main(["compare", "quickstart", "other=there", "rounds=3", "steps=8"]) == 0
    assert "B is larger" in capsys.readouterr().out
    assert [checkout == ROOT for checkout, _ in asked] == [True, False, False, True, True, False]
    assert [fields for _, fields in asked[::2]] == [["rounds=1", f"seed={n}", "steps=8"] for n in range(3)]
    assert len(list(Path("runs/bench/compare/quickstart").iterdir())) == 6


@pytest.mark.parametrize(
    ("end", "code"), [(KeyboardInterrupt(), 130), (subprocess.CalledProcessError(1, "the bench"), 1)]
)
def test_rounds_that_are_finished_survive_an_end_in_the_middle(end, code, checkouts, capsys):
    _, rounds = checkouts
    rounds += [*(a_round(step_s) for step_s in (1.0, 2.0, 2.1, 1.1, 1.2, 2.3)), end]
    assert main(["compare", "step", "other=there", "rounds=7"]) == code
    assert "B is larger" in capsys.readouterr().out


def test_a_disturbed_pair_does_not_count(checkouts, capsys):
    asked, rounds = checkouts
    rounds += [a_round(1.0, others=0.9 if n == 3 else 0.0) for n in range(8)]
    assert main(["compare", "step", "other=there", "rounds=4"]) == 0
    assert "90 %" in capsys.readouterr().err
    assert len(asked) == 8


def test_a_comparison_ends_when_too_few_rounds_can_count(checkouts, capsys):
    asked, rounds = checkouts
    rounds += [a_round(1.0, others=0.9) for _ in range(8)]
    assert main(["compare", "step", "other=there", "rounds=4"]) == 2
    assert len(asked) == 4
    assert "0 of the rounds count" in capsys.readouterr().err


def test_a_figure_that_one_lacks_is_named_after_the_first_pair(checkouts, capsys):
    asked, rounds = checkouts
    rounds += [a_round(1.0) for _ in range(6)]
    assert main(["compare", "step", "other=there", "rounds=3", "metric=tokens_per_s"]) == 2
    assert len(asked) == 2
    assert "tokens_per_s" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_file_that_is_no_result_is_named(content, tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(content)
    assert main(["compare", str(path), str(path)]) == 2
    assert "a.json" in capsys.readouterr().err
