"""What the report prints is what the problems, the answers and the folder are, whatever is in them."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from engine.console.report import Progress, model_card, plot, print_report
from engine.diagnosis.advice import Finding
from engine.diagnosis.limit import Diagnosis
from engine.diagnosis.step_window import Limit
from engine.rollout.chat_template import ChatConfig
from engine.types import Prompt
from tests.support.fakes import a_prompt, a_trajectory, a_use

SUMMARY = {"steps": 1, "rl_wall_s": 1.0, "first_step_s": 1.0, "tool_calls": 0}
SUMMARY |= {"tool_calls_jailed": 0, "goodput": 1.0}


def test_brackets_and_spaces_are_shown_as_they_are(tmp_path):
    prompt = Prompt(id="0", messages=({"role": "user", "content": "[bold]What is x[0]?[/INST]"},), answer="[/i]")
    trajectory = replace(a_trajectory(sampled=5, reward=0.0), prompt=prompt)
    written, folder = io.StringIO(), tmp_path / "my runs" / "first [bold]"
    folder.mkdir(parents=True)
    (folder / "summary.json").touch()
    progress = Progress()
    progress.evaluated(0, [trajectory])
    print_report(Console(file=written, width=200), folder, SUMMARY, progress)
    text = written.getvalue()
    assert "1 steps in 1.0 s of training; first step after 1.0 s; 0 of 0 tool calls jailed; goodput 1.00" in text
    parts = {"imports": 0.25, "engines": 0.75}
    print_report(Console(file=written, width=200), folder, SUMMARY | {"first_step_parts_s": parts}, progress)
    assert "first step after 1.0 s (imports 0.2, engines 0.8); 0 of 0" in written.getvalue()
    print_report(Console(file=written, width=200), folder, SUMMARY | {"first_step_s": None}, progress)
    assert "1 steps in 1.0 s of training; 0 of 0 tool calls jailed; goodput 1.00" in written.getvalue()
    assert "[bold]What is x[0]?[/INST]" in text
    assert "answer: [/i]" in text
    assert f"  {folder}/summary.json" in text


def test_what_limited_the_run_is_said_with_its_alarms_and_one_piece_of_advice(tmp_path):
    alarm = Finding(text="a replica is [down]", figures={}, option="kv_blocks", value=40)
    advised = tuple(Finding(text=text, figures={}, option="slots") for text in ("first advice", "second advice"))
    found = Diagnosis(sentence="Tools [all] limit it.", limit=Limit.TOOL, alarms=(alarm,), advice=advised)
    written = io.StringIO()
    print_report(Console(file=written, width=200), tmp_path, SUMMARY, Progress(), found)
    text = written.getvalue()
    assert "Tools [all] limit it." in text
    assert "a replica is [down]: kv_blocks (now 40)" in text
    assert "first advice: slots" in text
    assert "second advice" not in text


def a_progress(evaluations, steps):
    """evaluations: {step: accuracy}, a second of training for each step."""
    progress = Progress()
    for step in range(steps + 1):
        score = evaluations.get(step)
        names = ("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high", "eval/tool_error_share_correct")
        counts = {"eval/n": 4, "eval/tool_calls": 2, "eval/tool_calls_jailed": 2}
        found = {} if score is None else dict.fromkeys(names, score) | counts
        numbers = {"reward": 0.5, "tools/error_share_correct": 0.1, "rollout/staleness_max": 0} if step else {}
        progress.step(step, {"time/train_total_s": float(step), **numbers, **found})
    return progress


@pytest.mark.parametrize(
    ("evaluations", "seconds"),
    [
        ({0: 0.95, 2: 0.97}, 0.0),
        ({0: 0.5, 2: 0.7, 4: 0.95, 6: 0.8}, 2 + 2 * 0.2 / 0.25),
        ({2: 0.9}, 2.0),
        ({0: 0.5, 2: 0.89}, None),
    ],
)
def test_the_seconds_to_an_accuracy_are_from_the_first_time_that_it_is_there(evaluations, seconds):
    assert a_progress(evaluations, 6).seconds_to(0.9) == pytest.approx(seconds)


def test_the_mean_seconds_of_a_step_are_of_those_that_have_them():
    progress = a_progress({0: 0.5}, 3)
    for row, seconds in zip(progress.steps, (2.0, None, 4.0), strict=True):
        row["time/learn_s"] = 1.0
        if seconds is not None:
            row["time/step_s"] = seconds
    means = progress.summary()["mean_seconds_per_step"]
    assert (means["step"], means["learn"], means["rollout"]) == (3.0, 1.0, None)


def test_an_evaluation_that_was_lost_is_counted_and_a_later_one_is_not_shown_as_that_before_training(
    tmp_path, monkeypatch
):
    assert a_progress({0: 0.5, 4: 0.6, 6: 0.7}, 6).missed(4) == 0
    progress = a_progress({4: 0.6, 6: 0.7}, 6)
    trajectory = a_trajectory(sampled=5, reward=1.0)
    progress.evaluated(4, [trajectory])
    progress.evaluated(6, [trajectory])
    summary = progress.summary()
    assert progress.missed(4) == 1
    assert progress.missed(2) == 2
    assert (summary["accuracy_initial"], summary["tool_error_share_initial"], summary["accuracy_final"]) == (
        *(None, None),
        0.7,
    )
    written, titles = io.StringIO(), []
    print_report(Console(file=written, width=200), tmp_path, SUMMARY, progress)
    lines = written.getvalue().splitlines()
    assert "before training" in lines[0]
    assert not any("before" in line for line in lines[1:] if "│" in line or "┃" in line)
    assert any("accuracy (pass@1)" in line and "1.000" in line for line in lines)
    monkeypatch.setattr(Axes, "set_title", lambda self, title: titles.append(title))
    plot(tmp_path / "plot.png", progress, "GRPO-RoC")
    assert titles == ["GRPO-RoC: held-out accuracy 0.70 (n = 4)"]


def test_a_run_of_one_step_shows_its_reward(tmp_path, monkeypatch):
    drawn, real = [], Axes.plot

    def draws(self, *args, **options):
        drawn.extend(lines := real(self, *args, **options))
        return lines

    monkeypatch.setattr(Axes, "plot", draws)
    plot(tmp_path / "plot.png", a_progress({0: 0.5, 1: 0.6}, 1), "roc")
    assert {line.get_marker() for line in drawn if len(line.get_xdata()) == 1} == {"o"}


def test_the_problems_shown_are_three_different_ones():
    """Mended ones first; with more samples than one of a problem, too."""
    problems = [a_prompt(n, f"problem {n}") for n in range(5)]

    def evaluated(*rewards):  # two samples of each problem
        pairs = zip([problem for problem in problems for _ in range(2)], rewards, strict=True)
        return [replace(a_trajectory(sampled=5, reward=float(reward)), prompt=prompt) for prompt, reward in pairs]

    before, after = evaluated(1, 0, 1, 1, 0, 0, 1, 1, 1, 1), evaluated(1, 1, 0, 0, 1, 1, 1, 1, 1, 1)
    written = io.StringIO()
    progress = Progress()
    progress.evaluated(0, before)
    progress.evaluated(8, after)
    print_report(Console(file=written, width=200), Path("run"), SUMMARY, progress)
    assert re.findall(r"problem \d", written.getvalue()) == ["problem 0", "problem 2", "problem 1"]


def test_a_reward_below_zero_is_not_right():
    prompt = a_prompt()
    rewards = (-1.0, 0.0, None, 0.01)
    trajectories = [replace(a_trajectory(sampled=5, reward=reward), prompt=prompt) for reward in rewards]
    for trajectory, verdict in zip(trajectories, ("wrong", "wrong", "wrong", "right"), strict=True):
        written = io.StringIO()
        progress = Progress()
        progress.evaluated(0, [trajectory])
        print_report(Console(file=written, width=200), Path("run"), SUMMARY, progress)
        assert re.findall("right|wrong", written.getvalue()) == [verdict] * 2


def test_examples_of_another_evaluation_are_not_compared():
    before = [replace(a_trajectory(sampled=5, reward=0.0), prompt=a_prompt(n, f"problem {n}")) for n in (0, 1)]
    after = [replace(a_trajectory(sampled=5, reward=1.0), prompt=a_prompt(2, "problem 2"))]
    progress, written = Progress(), io.StringIO()
    progress.evaluated(0, before)
    progress.evaluated(8, after)
    print_report(Console(file=written, width=200), Path("run"), SUMMARY, progress)
    assert re.findall(r"problem \d", written.getvalue()) == ["problem 2"]


def test_an_example_names_the_tool_that_answered():
    uses = [replace(a_use(), name="lookup", response="a city"), replace(a_use(), name="", response="FormatError")]
    progress, written = Progress(), io.StringIO()
    progress.evaluated(0, [a_trajectory(sampled=5, reward=1.0, uses=uses)])
    print_report(Console(file=written, width=200), Path("run"), SUMMARY, progress)
    assert "lookup answered: a city" in written.getvalue()
    assert "tool answered: FormatError" in written.getvalue()


@pytest.mark.parametrize(("rewards", "shown"), [((0.2, 0.9), (0.0, 1.02)), ((-0.5, 3.0), (-0.5, 3.0))])
def test_the_plot_shows_rewards_of_any_size(tmp_path, monkeypatch, rewards, shown):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *rest, **more: figures.append(figure))
    evaluated = {f"eval/{name}": 0.5 for name in ("accuracy", "accuracy_low", "accuracy_high")}
    evaluated |= {"eval/n": 8, "eval/tool_error_share_correct": 0.0}
    progress = Progress()
    progress.step(0, evaluated)
    for step, reward in enumerate(rewards, 1):
        progress.step(step, {"reward": reward, "tools/error_share_correct": 0.1, "time/train_total_s": float(step)})
    plot(tmp_path / "reward.png", progress, "roc")
    assert figures[0].axes[0].get_ylim() == shown


def test_a_model_card_says_where_the_model_comes_from_and_how_good_it_was():
    scores = {
        "accuracy_initial": 0.25,
        "accuracy_final": 0.75,
        "accuracy_final_interval": [0.5, 0.875],
        "accuracy_n": 4,
    }
    given = {"steps": 3, "versions": {"torch": "2.13"}}
    card = model_card("GRPO-RoC", Path("models/seed"), "python train.py steps=3", ChatConfig(), {**given, **scores})
    for part in ("GRPO-RoC", "models/seed", "python train.py steps=3", "0.750 [0.500, 0.875]", "0.250", "torch 2.13"):
        assert part in card
    assert "accuracy" not in model_card("", Path("models/seed"), "python train.py", ChatConfig(), given)


def test_a_model_card_says_how_the_model_was_asked():
    chat = ChatConfig(system="Think.\nThen answer.", template_arguments={"enable_thinking": False})
    card = model_card("", Path("models/seed"), "python train.py", chat, {"steps": 3, "versions": {}})
    for part in ("    Think.\n    Then answer.\n", '{"enable_thinking": false}', "--tool-call-parser hermes"):
        assert part in card
    assert "system message" not in model_card("", Path("m"), "train", ChatConfig(), {"steps": 3, "versions": {}})
