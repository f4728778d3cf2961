"""An agent on the plain openai client trains on the tokens of the built-in loop, id for id."""

import json
import subprocess
import sys

import pytest

from engine.recording.reader import RecordedRun
from engine.recording.rollouts import load_tokenizer, rollouts_of
from tests.support.paths import ROOT
from tests.support.replay import one_of_several_turns, replayed

OPTIONS = ("steps=2", "prompts_per_step=4", "group_size=4", "eval_every=1", "eval_problems=4")


def rolled_out(recipe, folder):
    """Rollouts and metrics of a run of two steps."""
    command = [sys.executable, str(ROOT / recipe), *OPTIONS, f"runs={folder}", "name=run"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = folder / "run"
    record = RecordedRun(run)
    rows = [row for step in (1, 2) for row in rollouts_of(record, step, load_tokenizer(record.tokenizer))]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return rows, [row for row in steps if "reward" in row]


def of_both(trajectory):
    """What the loop and the agent must agree in."""
    spans = [(turn.start, turn.end) for turn in trajectory.turns]
    return trajectory.token_ids_T.tolist(), spans, trajectory.text, trajectory.reward, trajectory.stop


@pytest.mark.timeout(450)
def test_the_openai_agent_trains_on_what_the_built_in_loop_trains_on(tmp_path):
    found = []
    for recipe in ("recipes/quickstart.py", "recipes/agents/openai_agent.py"):
        folder = tmp_path / recipe.replace("/", "-")
        folder.mkdir()
        found.append(rolled_out(recipe, folder))
    (built, built_steps), (agent, agent_steps) = found
    assert len(built) == 2 * 4 * 8
    for one, other in zip(built, agent, strict=True):
        assert one.kept == other.kept
        assert of_both(one.trajectory) == of_both(other.trajectory)
    losses = [[row["learner/loss"] for row in steps] for steps in (built_steps, agent_steps)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    run = tmp_path / "recipes-agents-openai_agent.py" / "run"
    again = replayed(run, *one_of_several_turns(run), "turn=0", "start=true")
    assert again["first_difference"] is None, "a replay runs the agent"
    assert again["again"]["reward"] == again["recorded"]["reward"]
