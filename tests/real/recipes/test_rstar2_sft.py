"""Supervised fine-tuning as a user runs it: it learns, goes on after a kill as if there was none, and exports."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.rollout.chat_template import ChatTemplate
from tests.support.conversations import chat_row, installed, sum_row, write_rows
from tests.support.paths import ROOT
from tests.support.runs import Run, metrics

RECIPE = [sys.executable, "-u", str(ROOT / "recipes" / "rstar2" / "sft.py")]
SMALL = ["steps=6", "batch_size=8", "held_out_rows=8", "max_tokens=500", "learner.lr=3e-3", "learner.threads=1"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """model= and data=: sums that call a tool, and some chat, in two files."""
    folder = tmp_path_factory.mktemp("inputs")
    model = installed(folder / "model")
    sums = write_rows(folder / "sums.jsonl", [sum_row(a, b) for a in range(5) for b in range(8)])
    chat = write_rows(folder / "chat.jsonl", [chat_row(f"Hello {n}.") for n in range(8)])
    return [f"model={model}", f"data={sums},{chat}"]


def command(inputs: list[str], runs: Path, *fields: str) -> list[str]:
    return [*RECIPE, *inputs, f"runs={runs}", *SMALL, *fields]


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(row["step"], row["loss"]) for row in metrics(folder) if "loss" in row]


@pytest.mark.timeout(400)
def test_it_learns_and_a_killed_run_learns_the_same(started: list[Run], inputs: list[str], tmp_path: Path) -> None:
    whole = Run(command(inputs, tmp_path / "whole", "format_prompts=4", "format_tokens=40"))
    started.append(whole)
    whole.until("saving the checkpoint")  # an engine and the learner have started by then: minutes on a busy machine
    assert whole.end() == 0, whole.text()
    folder = tmp_path / "whole" / "sft"
    expected = losses(folder)
    assert [step for step, _ in expected] == [1, 2, 3, 4, 5, 6]
    assert expected[-1][1] < 0.7 * expected[0][1]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["held_out_loss"]["after"] < summary["held_out_loss"]["before"]
    assert {"before", "after"} == summary["tool_calls"].keys()
    assert len((folder / "format-after.jsonl").read_text().splitlines()) == 4
    assert (folder / "loss.png").exists()
    check_export(folder / "checkpoint")

    killed = Run(command(inputs, tmp_path / "killed", "checkpoint_every=2", "format_prompts=0"))
    started.append(killed)
    killed.until("step    3")
    killed.process.kill()
    assert killed.end() == -9
    again = Run(command(inputs, tmp_path / "killed", "checkpoint_every=2", "format_prompts=0"))
    started.append(again)
    again.until("saving the checkpoint")
    assert again.end() == 0, again.text()
    assert "at step 2" in again.text()
    assert losses(tmp_path / "killed" / "sft") == expected
    assert killed.left() == again.left() == []


def check_export(checkpoint: Path) -> None:
    """It stands alone."""
    AutoModelForCausalLM.from_pretrained(checkpoint)
    end = AutoTokenizer.from_pretrained(checkpoint).convert_tokens_to_ids("<|im_end|>")
    assert json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"] == end
    assert ChatTemplate.load(checkpoint).prefill == "<reason>"
    assert "tool" in (checkpoint / "README.md").read_text()


def test_ctrl_c_ends_it_and_says_how_to_go_on(started: list[Run], inputs: list[str], tmp_path: Path) -> None:
    long = [field.replace("steps=6", "steps=1000") for field in command(inputs, tmp_path, "format_prompts=0")]
    run = Run(long)
    started.append(run)
    run.until("step    2")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.text()
    assert "Traceback" not in run.text()
    assert f"runs={tmp_path}" in run.text().splitlines()[-1]
    assert (tmp_path / "sft" / "loss.png").exists()
    assert run.left() == []


def test_a_bad_row_ends_it_with_one_line_before_anything_is_trained(inputs: list[str], tmp_path: Path) -> None:
    bad = write_rows(tmp_path / "bad.jsonl", [chat_row(), {"messages": [{"role": "user"}]}])
    done = subprocess.run(
        [*command(inputs, tmp_path / "runs"), f"held_out={bad}"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert f"{bad}, line 2: messages: message 0: content" in line
    assert not (tmp_path / "runs" / "sft").exists()
