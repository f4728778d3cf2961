"""The cold start: its recipe writes a loadable checkpoint, and says early what is wrong."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.console.options import parse
from engine.types import Boundary, RolloutError, StopReason
from recipes.tiny.cold_start import Config, main, shares
from recipes.tiny.task import SHIPPED
from recipes.tools.cold_start import Config as ToolsConfig
from tests.support.fakes import a_trajectory, a_use
from tests.support.paths import ROOT
from tests.support.runs import Run

RECIPE = [sys.executable, str(ROOT / "recipes" / "tiny" / "cold_start.py")]
SMALL = ["craft_steps=3", "manners_steps=2", "eval_problems=4", "threads=1"]


@pytest.mark.timeout(400)
def test_recipe_writes_a_checkpoint_that_loads(tmp_path):
    output, temporary = tmp_path / "new" / "agent", tmp_path / "tmp"
    temporary.mkdir()
    command, environment = [*RECIPE, f"output={output}", *SMALL], {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, env=environment)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight is model.lm_head.weight
    assert AutoTokenizer.from_pretrained(output).chat_template == AutoTokenizer.from_pretrained(SHIPPED).chat_template
    record = json.loads((output / "cold_start.json").read_text())
    assert record["config"]["seed"] == 1
    assert record["command"].endswith(" ".join(SMALL))
    figures = record["figures"]
    assert figures["parameters"] == 508_992
    assert [len(figures[name]) for name in ("loss_craft", "loss_manners")] == [3, 2]
    assert [figures[name]["n"] for name in ("after_craft", "sampled", "greedy")] == [4, 4, 4]


@pytest.mark.parametrize("make", [Config, ToolsConfig])
def test_a_folder_of_other_things_is_not_written_to(make, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for output in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ValueError, match="output must be a"):
            make(output=output)
    (tmp_path / "config.json").write_text("{}")
    make(output=tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", ["sql", "files"])
def test_a_model_for_the_tools_can_be_trained_by_their_recipe(recipe, tmp_path):
    output = tmp_path / "agent"
    made = [str(ROOT / "recipes" / "tools" / "cold_start.py"), f"recipe={recipe}", "craft_steps=2", "manners_steps=1"]
    trained = [str(ROOT / "recipes" / "tools" / f"{recipe}.py"), f"model={output}", f"runs={tmp_path}", "steps=1"]
    small = ["prompts_per_step=1", "group_size=2", "eval_problems=1", "replicas=1", "slots=2", "rollout.max_tokens=256"]
    for command in ([*made, f"output={output}"], [*trained, *small]):
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=140)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(AutoTokenizer.from_pretrained(output)) == 768


def test_figures_are_shares_of_what_was_graded():
    lost = RolloutError(boundary=Boundary.SANDBOX, message="lost")
    assert shares(
        [
            a_trajectory(reward=1.0, uses=[a_use("error"), a_use(), a_use()]),
            a_trajectory(reward=0.0, uses=[a_use("error")]),
            a_trajectory(reward=1.0, uses=[a_use()]),
            a_trajectory(reward=1.0),
            a_trajectory(reward=0.0, stop=StopReason.LENGTH),
            a_trajectory(stop=StopReason.ERROR, error=lost),
        ]
    ) == {"n": 5, "correct": 0.6, "tool": 0.6, "error_in_correct": 0.25, "correct_given_tool": 0.6667, "truncated": 0.2}


@pytest.mark.parametrize("field", ["craft_steps", "manners_steps", "eval_problems", "threads", "seed"])
def test_impossible_sizes_name_the_field(field, capsys):
    least = 0 if field == "seed" else 1
    with pytest.raises(SystemExit) as ended:
        parse(Config, [f"{field}={least - 1}"])
    assert ended.value.code == 2
    assert f"{field} must be at least {least}, got {least - 1}" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_trained(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([f"output={tmp_path / 'file' / 'agent'}", *SMALL]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("tiny_cold_start: ")
    assert str(tmp_path / "file" / "agent") in said.err
    assert said.out == ""


def test_ctrl_c_ends_it_with_one_line(started, tmp_path):
    output = tmp_path / "agent"
    run = Run([*RECIPE, f"output={output}"])
    started.append(run)
    deadline = time.monotonic() + 60
    while not output.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.text()
    assert run.text().splitlines()[-1] == "tiny_cold_start: interrupted"
    assert "Traceback" not in run.text()
