"""Nothing that a model or a tool wrote reaches the terminal or a log of the run as an order."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from engine.commands.rollouts import panel
from engine.console.notes import say
from engine.console.report import Progress, print_report
from engine.diagnosis.advice import Finding
from engine.diagnosis.limit import Diagnosis
from engine.diagnosis.step_window import Limit
from engine.errors import BadInput
from engine.programs.job import run
from engine.run.run_folder import RunFolder
from engine.types import Prompt
from sandbox.printable import printable
from tests.support.algo_fakes import tool_use
from tests.support.fakes import a_rollout, a_trajectory

EVIL = "\x1b]52;c;cm0=\x07\x9b2J\u202e[red]\r"
SUMMARY = {"steps": 1, "rl_wall_s": 1.0, "first_step_s": 1.0, "tool_calls": 0}
SUMMARY |= {"tool_calls_jailed": 0, "goodput": 1.0}


def an_evil_trajectory():
    use = replace(tool_use("ok"), response=EVIL, name=f"python{EVIL}")
    prompt = Prompt(id=f"0{EVIL}", messages=({"role": "user", "content": EVIL},), answer=EVIL)
    return replace(a_trajectory(sampled=5, reward=0.0, uses=[use]), prompt=prompt, text=EVIL, scores={EVIL: 1.0})


def report(console, tmp_path):
    progress = Progress()
    progress.evaluated(0, [an_evil_trajectory()])
    progress.evaluated(1, [an_evil_trajectory()])
    alarm = Finding(text=EVIL, figures={}, option="kv_blocks", value=40)
    found = Diagnosis(sentence=EVIL, limit=Limit.TOOL, alarms=(alarm,), advice=(alarm,))
    print_report(console, tmp_path, SUMMARY, progress, found)


def written(console, tmp_path):
    trajectory = an_evil_trajectory()
    console.print(panel(a_rollout(trajectory, drop=EVIL)))


def line(console, tmp_path):
    say(console, EVIL)


@pytest.mark.parametrize("shows", [report, written, line])
@pytest.mark.parametrize("terminal", [False, True])
def test_orders_are_shown(tmp_path, shows, terminal):
    console = Console(file=io.StringIO(), width=400, force_terminal=terminal, color_system=None)
    shows(console, tmp_path)
    text = console.file.getvalue()
    assert printable(EVIL) in text
    assert printable(text) == text


def test_a_note_is_one_line_whatever_it_holds(tmp_path):
    with RunFolder.open(tmp_path, "run") as folder:
        folder.note(f"{EVIL}\n2026-01-01 00:00:00 joined the run")
        text = (folder.path / "notes.log").read_text()
    assert text.count("\n") == 1
    assert printable(text) == text


def test_a_very_long_note_is_cut_and_says_so(tmp_path):
    with RunFolder.open(tmp_path, "run") as folder:
        folder.note("a" * 10_000_000)
        text = (folder.path / "notes.log").read_text()
    assert len(text) < 10_000
    assert "10,000,000" in text


def test_an_error_is_shown(capsys):
    async def fail():
        raise BadInput(f"row 3: {EVIL}")

    assert run("a recipe", fail()) == 2
    said = capsys.readouterr().err
    assert said == f"error: row 3: {printable(EVIL)}\n"
