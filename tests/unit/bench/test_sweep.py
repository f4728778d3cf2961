"""A sweep: its points are kept and go on, it says what it measured, and it takes recipes too."""

import pytest

from bench.__main__ import main
from bench.commands import sweep
from bench.commands.sweep import Options, combinations, panels, rows_of
from bench.drawing.sweep_plot import draw, lines_of
from bench.measuring.metric import ratio, seconds
from bench.measuring.recipe_run import METRICS, figures
from engine.console.options import parse
from tests.support.bench_results import a_result


def test_a_sweep_is_every_combination():
    assert len(combinations("a:1,2", "b:x,y,z")) == 6
    for wrong in ("a", "a:", ":1"):
        with pytest.raises(ValueError, match="FIELD:VALUE"):
            combinations(wrong)


def points_of(**given):
    metrics = {"step_s": seconds("step", "time of a step"), "over": ratio("over", "")}
    results = [a_result(metrics=metrics, step_s=[1.0 * n], over=[2.0], **given) for n in (1, 2)]
    return [({"n": str(n + 1)}, result) for n, result in enumerate(results)]


def test_a_sweep_has_a_row_for_each_figure_and_a_column_for_each_point():
    assert rows_of(points_of(), "step_s") == [["step_s", "1.00 s", "2.00 s"]]
    assert [row[0] for row in rows_of(points_of(), "")] == ["step_s", "over"]
    with pytest.raises(ValueError, match="step_s"):
        rows_of(points_of(), "other")


def test_a_ratio_of_a_disturbed_point_is_neither_shown_nor_drawn():
    disturbed = points_of(disturbed="other processes used 95 % of the CPU")
    assert rows_of(disturbed, "over") == [["over", "-", "-"]]
    assert lines_of(disturbed, "n", None, "over") == {}
    assert lines_of(disturbed, "n", None, "step_s") == {"step_s": [("1", 1.0, [1.0]), ("2", 2.0, [2.0])]}


def test_a_point_beside_which_others_used_the_machine_is_marked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (quiet, first), (busy, second) = points_of()[0], points_of(others=0.6, disturbed="others used 60 %")[1]
    sweep.show(parse(Options, ["step", "over=n:1,2"]), [(quiet, first), (busy, second)])
    shown = capsys.readouterr().out
    assert "n=2 *" in shown
    assert "n=1 *" not in shown
    assert "* n=2: others used 60 %" in shown


def test_the_plot_has_the_figures_that_answer_the_question_unless_one_is_chosen(tmp_path):
    every = parse(Options, ["step", "over=n:1,2"])
    assert panels(every, points_of()) == [(None, "step_s")]
    assert panels(parse(Options, ["step", "over=n:1,2", "metric=over"]), points_of()) == [(None, "over")]
    draw(tmp_path / "a.png", points=points_of(), over="n", metrics=[(None, "step_s"), (None, "over")])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_shows_the_finished_points(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()

    def interrupted(options, chosen):
        if chosen["slots"] == "2":
            raise KeyboardInterrupt
        return a_result(step_s=[1.0])

    monkeypatch.setattr(sweep, "point", interrupted)
    assert main(["sweep", "mine.py", "over=slots:1,2"]) == 130
    assert "1.00 s" in capsys.readouterr().out


def test_a_target_that_is_no_bench_and_no_recipe_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "nowhere.py", "over=a:1"])
    assert ended.value.code == 2
    assert "nowhere.py" in capsys.readouterr().err


def test_figures_of_a_run_are_those_of_its_settled_steps_and_nothing_is_made_up():
    rows = [
        {"step": 0, "eval/accuracy": 0.1},
        *({"step": n, "time/step_s": s, "tokens/generated": 10} for n, s in ((1, 9.0), (2, 9.0), (3, 1.0), (4, 3.0))),
        {"step": 2, "eval/accuracy": 0.7, "time/train_total_s": 18.0},
        {"step": 4, "eval/accuracy": 0.8, "time/train_total_s": 22.0},
    ]
    made = figures(rows, goal=0.7)
    assert made["step_s"] == 2.0
    assert made["tokens_per_s"] == 5.0
    assert (made["accuracy"], made["to_goal_s"]) == (0.8, 18.0)
    assert "to_goal_s" not in figures(rows, goal=0.9)
    assert made.keys() <= METRICS.keys()
    assert not made.keys() & {"kl", "reward", "goodput"}, "what a run did not measure is a gap"
    with pytest.raises(ValueError, match="no step"):
        figures(rows[:1], goal=0.9)
