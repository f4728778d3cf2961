"""The README's examples, run as they are written."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.pipeline.pipeline import Pipeline, Stage
from engine.types import Group, Trajectory
from tests.contracts import check_loss, check_reward, check_tool
from tests.support.fakes import a_trajectory

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def example(word: str) -> str:
    [block] = [block for block in BLOCKS if block.startswith(f"# {word}:")]
    return block


def defined(word: str) -> dict:
    names: dict = {}
    exec(compile(example(word), f"README.md ({word})", "exec"), names)
    return names


def solved(answer: str, reward: float | None = None) -> Trajectory:
    return replace(a_trajectory(sampled=5, reward=reward), text=f"<answer>\\boxed{{{answer}}}</answer>")


@pytest.mark.parametrize("word", ["stage", "tool", "reward", "loss"])
def test_examples_are_short(word: str) -> None:
    assert len(example(word).splitlines()) < 20


async def test_the_stage() -> None:
    passed = []

    async def groups(inbox, outbox) -> None:
        for rewards in ((1.0, 1.0), (1.0, 0.0), (1.0, None)):  # None: the grader failed
            members = tuple(solved("42", reward) for reward in rewards)
            await outbox.put(Group(prompt=members[0].prompt, trajectories=members, lease=0))

    async def note(inbox, outbox) -> None:
        async for group in inbox:
            passed.append(group.drop)

    stages = [Stage(name="groups", run=groups), defined("stage")["stage"], Stage(name="note", run=note)]
    await Pipeline(stages).run()
    assert passed == ["easy", None, "easy"]


async def test_the_tool() -> None:
    tool = defined("tool")["Lookup"]({"roc": "a giant bird"})
    assert (await tool({"word": "roc"})).text == "a giant bird"
    assert (await tool({"word": "cat"})).outcome == "error"
    await check_tool(tool, {"word": "roc"})


async def test_the_reward() -> None:
    brief = defined("reward")["Brief"]()
    assert await brief(solved("42")) == pytest.approx(0.995)
    assert await brief(solved("41")) == 0.0
    assert await brief(replace(solved("42"), sampled_T=np.ones(5000, np.bool_))) > 0
    await check_reward(brief, [solved("42"), solved("41")])


def test_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "readme_loss.py").write_text(example("loss"))
    monkeypatch.syspath_prepend(tmp_path)
    check_loss(importlib.import_module("readme_loss").Hinge(margin=0.5))


def test_the_sandbox_alone() -> None:
    [block] = [block for block in BLOCKS if "Sandbox(" in block]
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout == "ok 42\n\n21\n", done.stderr
