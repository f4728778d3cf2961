"""What the report prints is what the problems, the answers and the folder are, whatever is in them."""

import io
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console

from engine.types import Prompt
from recipes.tiny_report import print_report
from tests.fakes import a_trajectory

SUMMARY = {"seconds_to_090": None, "steps": 1, "rl_wall_s": 1.0, "first_step_s": 1.0, "tool_calls": 0}
SUMMARY |= {"tool_calls_jailed": 0, "goodput": 1.0}


def test_brackets_and_spaces_are_shown_as_they_are():
    prompt = Prompt(id="0", messages=({"role": "user", "content": "[bold]What is x[0]?[/INST]"},), answer="[/i]")
    trajectory = replace(a_trajectory(sampled=5, reward=0.0), prompt=prompt)
    written, folder = io.StringIO(), Path("my runs/first [bold]")
    progress = SimpleNamespace(samples=[[trajectory], [trajectory]])
    print_report(Console(file=written, width=200), folder, SUMMARY, progress)
    text = written.getvalue()
    assert "1 steps in 1.0 s of training; first step after 1.0 s; 0 of 0 tool calls jailed; goodput 1.00" in text
    print_report(Console(file=written, width=200), folder, SUMMARY | {"first_step_s": None}, progress)
    assert "1 steps in 1.0 s of training; 0 of 0 tool calls jailed; goodput 1.00" in written.getvalue()
    assert "[bold]What is x[0]?[/INST]" in text
    assert "answer: [/i]" in text
    assert f"  {folder}/summary.json" in text
    command = next(line for line in text.splitlines() if "talk to it: " in line).partition("talk to it: ")[2]
    assert shlex.split(command)[-2:] == ["--checkpoint", str(folder)]
