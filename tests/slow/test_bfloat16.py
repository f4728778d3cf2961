"""The quick start in the dtypes of GPUs, on the CPU: replicas, passes and published weights in bfloat16, masters in
float32.

`make campaigns` trains three seeds in both dtypes to the end (six runs of two minutes).
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from engine.fleet.canary import tolerance_of
from tests.support.paths import TINY
from tests.support.runs import SMALL, Run, command, metrics, numbers

BF16 = "dtype=bfloat16"
KILLED = [*SMALL, BF16, "steps=4", "eval_every=2", "checkpoint_every=2"]


def trained(runs: Path, *words: str) -> Path:
    done = subprocess.run(command(runs, *words), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return runs / "quickstart"


def check_judged(folder: Path) -> None:
    """Canary and mismatch are those of bfloat16, within what is allowed on GPUs, with room."""
    rows = [row for row in metrics(folder) if "reward" in row]
    means = [row["canary/mean_abs"] for row in rows]
    assert 1e-3 < min(means) <= max(means) < tolerance_of(TINY, "bfloat16") / 2
    mismatches = [row["learner/mismatch_fresh_mean"] for row in rows if "learner/mismatch_fresh_mean" in row]
    assert 1e-5 < max(mismatches) < 0.02, "a fifth of what is allowed"


@pytest.mark.timeout(500)
def test_canary_and_mismatch_are_those_of_bfloat16(tmp_path: Path) -> None:
    check_judged(trained(tmp_path, BF16, "steps=3", "eval_every=10", "eval_problems=8"))


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_and_resumed_repeats_every_decision(started: list[Run], tmp_path: Path) -> None:
    wanted = numbers(trained(tmp_path / "whole", *KILLED))
    killed = Run(command(tmp_path / "killed", *KILLED))
    started.append(killed)
    killed.until("step   3")
    killed.process.kill()
    killed.end()
    assert numbers(trained(tmp_path / "killed", *KILLED)) == wanted


@pytest.mark.campaign
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("seed", range(3))
def test_it_learns_as_in_float32(seed: int, tmp_path: Path) -> None:
    accuracy = {}
    for dtype in ("float32", "bfloat16"):
        folder = trained(tmp_path / dtype, f"dtype={dtype}", f"seed={seed}")
        accuracy[dtype] = json.loads((folder / "summary.json").read_text())["accuracy_final"]
    check_judged(folder)
    print(f"seed {seed}: {accuracy}", flush=True)
    assert accuracy["bfloat16"] >= 0.95 * accuracy["float32"]
