"""The quick start with the shipped mixture of experts: the whole loop, real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.runs import Run, command, metrics


@pytest.mark.timeout(400)
def test_a_mixture_of_experts_learns_in_ten_steps(started: list[Run], tmp_path: Path) -> None:
    """The bounds of its beginning are four standard errors around the recorded accuracy, 0.32, for 128 problems."""
    fields = ["model=recipes/tiny/agent_moe", "steps=10", "eval_every=10", "eval_problems=128"]
    run = Run(command(tmp_path, *fields))
    started.append(run)
    assert run.end(within_s=380) == 0, run.text()
    rows = metrics(tmp_path / "quickstart")
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert len(rewards) == 10
    assert sum(rewards[-2:]) / 2 - sum(rewards[:2]) / 2 >= 0.20, rewards
    assert 0.16 < rows[0]["eval/accuracy"] < 0.49
    assert all(row["learner/canary_unreached"] == 0 for row in rows[1:])
    summary = json.loads((tmp_path / "quickstart" / "summary.json").read_text())
    assert 0 < summary["canary_max_abs"] < 1e-4
    assert summary["accuracy_final"] > summary["accuracy_initial"]
