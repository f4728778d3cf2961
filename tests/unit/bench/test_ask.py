"""The questions on the page of the benches: what is kept of an answer, and how it is shown."""

import pytest

from bench import ROOT
from bench.commands.ask import Options, shown
from bench.measuring.questions import QUESTIONS, Answer, load, section


def an_answer(**given):
    values = {
        "commands": ("rocstar bench stage my.py:stage",),
        "printed": "a line",
        "wall_s": 61.2,
        "date": "2026-01-02",
        "commit": "abc1234",
        "machine": "2 cores",
    }
    return Answer(**{**values, "others": 0.0, **given})


def test_an_answer_is_shown_with_its_commands_its_seconds_and_its_picture():
    text = section({"stage": an_answer()})
    for part in (
        "rocstar bench stage my.py:stage",
        QUESTIONS["stage"].reading,
        "61 s on 2 cores",
        "abc1234",
        "a line",
        "](ask/stage.png)",
    ):
        assert part in text
    assert "other processes" not in text
    assert "other processes used 60 %" in section({"stage": an_answer(others=0.6)})


def test_lines_are_kept_by_their_pattern_without_the_checkouts_path():
    assert shown(f"plot: {ROOT}/runs/a.png\n\nnoise\n", r"^plot") == "plot: runs/a.png"


def test_an_answer_is_read_back(tmp_path):
    an_answer().write(tmp_path / "stage.json")
    assert load(tmp_path) == {"stage": an_answer()}
    (tmp_path / "scale.json").write_text("[]")
    with pytest.raises(ValueError, match=r"scale\.json"):
        load(tmp_path)


def test_a_question_that_there_is_not_is_named():
    with pytest.raises(ValueError, match="weather"):
        Options(questions=("weather",))
