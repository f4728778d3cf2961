"""What a recipe that trains on a file of the user's takes: columns, a reward, tools, and what it asks the model for."""

import sys

import pytest

from algo.reward.answers import ASK_FOR_ANSWER
from engine.console.options import flat, parse
from recipes import quickstart
from recipes.tiny.task import SHIPPED
from recipes.train_on_file import Config

MY = '''
from dataclasses import dataclass

def score(trajectory):
    """Reward."""
    return 1.0

async def slowly(trajectory) -> float:
    return 0.0

def calc(code: str, digits: int = 2) -> str:
    """Calculates.

    Args:
        code: an expression
    """
    return code

def untyped(code):
    return code

def of_two(trajectory, more):
    return 1.0

async def yields(trajectory):
    yield 1.0

@dataclass
class Fixed:
    value: float

    def __call__(self, trajectory):
        return self.value

half = Fixed(0.5)

class Whole:
    sees_group = True

    async def __call__(self, trajectories):
        return [1.0 for _ in trajectories]

whole = Whole()
'''


@pytest.fixture
def words(tmp_path, monkeypatch):
    """A folder with data and my.py, and the words that name the data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"question": "6 * 7", "answer": 42, "text": "7 * 7", "label": 49}\n')
    (tmp_path / "my.py").write_text(MY)
    return ["data=train.jsonl", "held_out=train.jsonl"]


@pytest.mark.parametrize(
    ("model", "system", "asked"),
    [
        (None, None, ASK_FOR_ANSWER),
        (None, "", None),
        (None, "Be brief.", "Be brief."),
        (SHIPPED, None, None),
        (SHIPPED, "Be brief.", "Be brief."),
    ],
)
def test_a_model_is_asked_for_the_form_that_is_graded(tmp_path, model, system, asked):
    data = tmp_path / "train.jsonl"
    data.write_text('{"question": "6 * 7", "answer": 42}\n')
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    config = Config(model=model or other, data=data, held_out=data, system=system)
    assert config.training().chat.system == asked


def test_it_has_all_options_of_the_quick_start(words):
    assert flat(quickstart.Config()).keys() <= flat(parse(Config, words)).keys()


def test_a_reward_and_tools_of_the_users_need_no_jail_and_no_form_of_answer(words):
    config = parse(Config, [*words, "reward=my.py:score", "tools=my.py:calc"])
    made = config.training()
    assert (made.sandbox, made.chat.system) == (None, None)
    for more in (["reward=my.py:slowly", "tools=my.py:calc,python"], ["reward=my.py:half"], ["tools="]):
        assert parse(Config, [*words, *more]).training().sandbox is not None


def test_columns_are_named(words):
    config = parse(Config, [*words, "question=text", "answer=label"])
    [prompt] = config.prompts(config.data)
    assert (prompt.messages[0]["content"], prompt.answer) == ("7 * 7", "49")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["question=problem"], ["'problem'", "question, answer, text, label"]),
        (["answer=solution"], ["'solution'", "question, answer, text, label"]),
        (["after_hashes=true", "answer=label"], ["answer", "after_hashes"]),
        (["held_out=no.jsonl"], ["no.jsonl", "held_out:"]),
        (
            ["reward=my.py:scores"],
            ["my.py has no 'scores'", "score, slowly, calc, untyped, of_two", "my.py:score"],
        ),
        (["reward=my.py"], ["score, slowly", "reward=my.py:score"]),
        (["reward=score"], ["reward=score", "FILE.py:NAME"]),
        (["reward=their.py:score"], ["'their.py'"]),
        (["reward=my.py:of_two"], ["reward=my.py:of_two", "trajectory alone"]),
        (["reward=my.py:Fixed"], ["reward=my.py:Fixed", "the class Fixed"]),
        (["reward=my.py:yields"], ["reward=my.py:yields", "not yield"]),
        (["tools=my.py:calc,python,my.py:calc"], ["different names", "calc, python, calc"]),
        (["skip_above=90"], ["skip_above", "90"]),
        (["tool_error_penalty=-1"], ["tool_error_penalty", "-1"]),
        (["tool_error_penalty=0.5", "reward=my.py:whole"], ["tool_error_penalty", "groups", "0.5"]),
        (["tool_wall_s=-1"], ["tool_wall_s", "-1"]),
        (["slots=0"], ["slots", "0"]),
        (["tools=python,my.py:untyped"], ["tools=my.py:untyped", "'code'", "my.py:"]),
        (["tools=my.py:lookup"], ["tools=my.py:lookup", "calc"]),
        (["tools=empty.py:calc"], ["empty.py has no function", "def lookup(word: str)"]),
        (["reward=broken.py:score"], ["broken.py, line 2: ZeroDivisionError"]),
        (["reward=ends.py:score"], ["ends.py, line 1: SystemExit"]),
        (["reward=odd.py:score"], ["odd.py", "line 1"]),
    ],
)
def test_what_is_wrong_is_one_line_that_says_what_there_is(words, tmp_path, capsys, given, told):
    (tmp_path / "empty.py").write_text("from pathlib import Path\n")
    (tmp_path / "broken.py").write_text("x = 0\ny = 1 / x\n")
    (tmp_path / "ends.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "odd.py").write_text("def score(\n")
    with pytest.raises(SystemExit) as ended:
        parse(Config, [*words, *given])
    assert ended.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    for part in told:
        assert part in line


def test_a_file_of_the_users_runs_once(words, tmp_path):
    (tmp_path / "my.py").write_text(MY + '\nwith open("ran", "a") as file:\n    file.write("x")\n')
    parse(Config, [*words, "reward=my.py:score", "tools=my.py:calc"])
    assert (tmp_path / "ran").read_text() == "x"


def test_a_file_of_the_users_may_import_what_lies_beside_it(words, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "its_helper.py").write_text("VALUE = 0.5\n")
    (tmp_path / "there" / "own.py").write_text(
        "from its_helper import VALUE\ndef score(trajectory):\n    return VALUE\n"
    )
    assert parse(Config, [*words, "reward=there/own.py:score"]).reward == "there/own.py:score"
