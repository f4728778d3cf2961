"""A task of the user's own without a recipe: a file of rows, and a Python file with a reward and a tool."""

import json
import subprocess
import sys
from itertools import islice

import pytest

from recipes.tiny.task import problems
from tests.support.paths import ROOT
from tests.support.replay import one_of_several_turns, replayed
from tests.support.runs import metrics

MY = '''
from engine.ports import Grade


def score(trajectory):
    calls = [call for turn in trajectory.turns for call in turn.tool_uses]
    right = any(call.outcome == "ok" and call.response == "13" for call in calls)
    return Grade(reward=float(right), scores={"calls": float(len(calls))})


async def python(code: str) -> str:
    """Works out lines of arithmetic.

    Args:
        code: lines such as x=2*21
    """
    if "y" in code:
        raise NameError("name 'y' is not defined")
    return "13"
'''
SMALL = ("steps=2", "prompts_per_step=4", "group_size=2", "eval_problems=4", "eval_every=2", "name=run")


@pytest.mark.timeout(300)
def test_columns_reward_and_tool_are_options(tmp_path):
    for split in ("train", "test"):
        rows = [{"text": each.question, "label": each.answer} for each in islice(problems(split, 0), 50)]
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "my.py").write_text(MY)
    given = ["data=train.jsonl", "held_out=test.jsonl", "question=text", "answer=label"]
    given += ["reward=my.py:score", "tools=my.py:python"]
    command = [sys.executable, str(ROOT / "recipes/train_on_file.py"), *given, *SMALL]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((tmp_path / "runs/run/summary.json").read_text())
    assert summary["tool_calls"] > 0 == summary["tool_calls_jailed"]
    rows = [row for row in metrics(tmp_path / "runs/run") if "reward" in row]
    assert len(rows) == 2
    for row in rows:
        assert 0 < row["reward"] <= row["score/calls"], "the reward is 1 where a call of the tool went well"
    run = tmp_path / "runs/run"
    again = replayed(run, *one_of_several_turns(run), "turn=1", "start=true")
    assert again["first_difference"] is None
    assert again["again"] == again["recorded"], "the reward and the tool of the file are those of the replay"
