"""Each recipe of the gallery runs for two steps, and each recipe that there is has a row here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from recipes.code import word_problems
from recipes.tiny.task import Split, problems
from tests.real.recipes.test_environments import GYM
from tests.support.conversations import installed, sum_row, write_rows
from tests.support.gallery import RECIPES
from tests.support.packages import environment_with, folder_with
from tests.support.paths import ROOT, TINY
from tests.support.runs import metrics

TWO_STEPS = ["steps=2", "name=run"]
SMALL = [*TWO_STEPS, "prompts_per_step=4", "group_size=2"]
EVALUATED = [*SMALL, "eval_problems=4"]


def questions(folder: Path) -> tuple[Path, Path]:
    """Writes files of the tiny task, to train and to evaluate on."""

    def write(split: Split, count: int) -> Path:
        rows = [{"question": each.question, "answer": str(each.answer)} for each in islice(problems(split, 0), count)]
        return write_rows(folder / f"{split}.jsonl", rows)

    return write("train", 24), write("test", 4)


def on_a_file(folder: Path) -> list[str]:
    train, test = questions(folder)
    return [*EVALUATED, f"data={train}", f"held_out={test}"]


def programs(folder: Path) -> list[str]:
    """Writes programming problems, to train and to evaluate on."""
    train, test = folder / "train.jsonl", folder / "test.jsonl"
    word_problems.main(word_problems.Config(output=train, rows=24))
    word_problems.main(word_problems.Config(output=test, split="test", rows=4))
    return [f"data={train}", f"held_out={test}"]


def a_stage(folder: Path) -> list[str]:
    train, test = questions(folder)
    budget = ["rollout.max_tokens=230", "eval_max_tokens=230", "eval_samples=1", "replica.kv_blocks=512"]
    return [*SMALL, "stage=1", "protocol=none", f"model={TINY}", f"data={train}", f"eval_sets={test}", *budget]


def fine_tuning(folder: Path) -> list[str]:
    rows = write_rows(folder / "sums.jsonl", [sum_row(a, b) for a in range(4) for b in range(8)])
    small = ["batch_size=8", "held_out_rows=8", "max_tokens=500", "format_prompts=2", "format_tokens=20"]
    return [*TWO_STEPS, f"model={installed(folder / 'model')}", f"data={rows}", *small]


ROWS: dict[str, Callable[[Path], list[str]]] = {
    "agents/openai_agent.py": lambda folder: EVALUATED,
    "agents/openai_agents.py": lambda folder: EVALUATED,
    "agents/program.py": lambda folder: EVALUATED,
    "code/train.py": lambda folder: [
        *(*EVALUATED, *programs(folder), "program=call", "rollout.max_tokens=230", "rollout.max_turns=4")
    ],
    "distill.py": lambda folder: [*EVALUATED, f"teacher={TINY}"],
    "environments/mcp_agent.py": lambda folder: EVALUATED,
    "environments/mixture.py": lambda folder: EVALUATED,
    "environments/train_verifiers.py": lambda folder: [
        *(*SMALL, "taskset=verifiers_example", "harness=verifiers_example")
    ],
    "quickstart.py": lambda folder: EVALUATED,
    "rstar2/rl.py": a_stage,
    "rstar2/sft.py": fine_tuning,
    "tools/files.py": lambda folder: [*EVALUATED, "rollout.max_tokens=960"],
    "tools/sql.py": lambda folder: [*EVALUATED, "rollout.max_tokens=960"],
    "train_on_file.py": on_a_file,
}
"""The options of each recipe, given a folder for what it reads."""


def python_of(recipe: str) -> tuple[str, dict[str, str]]:
    """Returns the interpreter that has the packages of a recipe, and what the environment adds. May skip the test."""
    match recipe:
        case "agents/openai_agents.py":
            return str(environment_with("with-openai-agents", "openai-agents==0.24.0") / "bin" / "python"), {}
        case "environments/mcp_agent.py":
            pytest.importorskip("mcp", reason="an extra: pip install mcp")
        case "environments/mixture.py":
            return sys.executable, {"PYTHONPATH": str(folder_with("reasoning-gym", *GYM))}
        case "environments/train_verifiers.py":
            python = environment_with("verifiers", "verifiers==0.4.0") / "bin" / "python"
            return str(python), {"PYTHONPATH": str(ROOT / "tests" / "support")}
    return sys.executable, {}


@pytest.mark.timeout(500)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_two_steps(recipe: str, tmp_path: Path) -> None:
    assert recipe in ROWS, f"recipes/{recipe} has no row here. Fix: add the options of a small run to ROWS"
    python, variables = python_of(recipe)
    (tmp_path / "inputs").mkdir()
    command = [python, str(ROOT / "recipes" / recipe), f"runs={tmp_path / 'runs'}", *ROWS[recipe](tmp_path / "inputs")]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env={**os.environ, **variables}, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [summary] = (tmp_path / "runs").rglob("summary.json")
    trained = [row["step"] for row in metrics(summary.parent) if {"reward", "loss"} & row.keys()]
    assert trained == [1, 2]
    assert json.loads(summary.read_text())["versions"]["torch"]


def test_each_row_is_a_recipe() -> None:
    assert ROWS.keys() <= set(RECIPES)
