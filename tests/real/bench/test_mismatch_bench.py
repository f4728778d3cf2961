"""The bench of sampler against learner: which difference lands in which row."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.benches.mismatch import BUCKET, Compared, figures, report
from tests.support.node import ANSWER, END, Setup, call
from tests.support.paths import ROOT


async def test_every_sampled_token_is_in_its_position_and_its_turn():
    async with Setup([call("print(1)") + END], [ANSWER]) as node:
        trajectory = await node.run()
    learner_N = np.concatenate([trajectory.logprobs_T] * 2)
    second = trajectory.turns[1].start
    learner_N[len(trajectory.token_ids_T) + second] += 0.5
    compared = Compared.of([trajectory] * 2, learner_N)
    assert len(compared.difference_M) == 2 * trajectory.sampled_tokens
    rows = dict(compared.slices())
    assert np.abs(rows["turn 1"]).max() == 0
    for name in ("all", "turn 2", f"position {second // BUCKET * BUCKET}-{second // BUCKET * BUCKET + BUCKET - 1}"):
        assert np.abs(rows[name]).max() == pytest.approx(0.5)
    assert sum(len(part) for name, part in rows.items() if "turn" in name) == len(compared.difference_M)
    table, metrics = report({"float32/float32": compared, "bfloat16/float32": compared})
    assert len(table) == 2 * len(rows)
    assert metrics.keys() == {
        f"mismatch_{kind}_{name}" for kind in ("max", "mean", "kl") for name in ("float32", "bfloat16_float32")
    }


def test_figures_are_of_the_size_and_the_divergence_is_k3():
    found = figures(np.log([0.5, 2.0, 1.0, 1.0]))
    assert found["max"] == pytest.approx(np.log(2))
    assert (found["p50"], found["mean"]) == pytest.approx((np.log(2) / 2, np.log(2) / 2))
    assert found["kl"] == pytest.approx((0.5 - 1 + np.log(2) + 2 - 1 - np.log(2)) / 4)


def test_the_bench_on_a_real_engine_and_a_real_learner(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "mismatch", "--trajectories=4", "--pairs=float32/float32"]
    surroundings = {"cwd": ROOT, "env": {**os.environ, "TMPDIR": str(tmp_path)}}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, **surroundings)
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(done.stdout.splitlines()[-1])["metrics"]["mismatch_max_float32"] < 1e-3
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []
