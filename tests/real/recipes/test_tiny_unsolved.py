"""Problems that the tiny agent does not always solve, as the quick start's third stage trains on them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.data.prompts import read_prompts
from tests.support.paths import ROOT

SMALL = ("problems=6", "samples=3", "replicas=1", "name=few")


def drawn(runs: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "recipes/tiny/unsolved.py"), *SMALL, f"runs={runs}", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.timeout(400)
def test_what_is_always_solved_is_dropped_and_the_same_command_goes_on(tmp_path: Path) -> None:
    done = drawn(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "few"
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [row["samples"] for row in rows] == [3] * 6
    everything, unsolved = (
        [prompt.messages[0]["content"] for prompt in read_prompts(folder / f"{name}.jsonl")]
        for name in ("all", "unsolved")
    )
    assert len(everything) == 6
    assert len(unsolved) == sum(row["solved"] < 3 for row in rows) > 0
    assert set(unsolved) <= set(everything)
    samples = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    (folder / "samples.jsonl").write_text("".join(samples[:4]))
    again = drawn(tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert sorted((folder / "samples.jsonl").read_text().splitlines(keepends=True)) == sorted(samples)
    other = drawn(tmp_path, "seed=1")
    assert other.returncode == 2
    assert "seed" in other.stderr
