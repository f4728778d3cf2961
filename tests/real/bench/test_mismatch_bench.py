"""The bench of sampler against learner: which difference lands in which row."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.benches.mismatch import LATE, METRICS, Compared
from tests.support.node import ANSWER, END, Setup, call
from tests.support.paths import ROOT

pytestmark = pytest.mark.campaign  # `make bench` runs them too


async def test_every_sampled_token_is_in_its_position_and_its_turn():
    async with Setup([call("print(1)") + END], [ANSWER]) as node:
        trajectory = await node.run()
    learner_N = np.concatenate([trajectory.logprobs_T] * 2)
    second = trajectory.turns[1].start
    learner_N[len(trajectory.token_ids_T) + second] += 0.5
    compared = Compared.of([trajectory] * 2, learner_N)
    assert len(compared.difference_M) == 2 * trajectory.sampled_tokens
    [wrong] = np.flatnonzero(compared.difference_M)
    assert (compared.positions_M[wrong], compared.turns_M[wrong]) == (second, 2)
    assert compared.figures()["max"] == pytest.approx(0.5)


def test_figures_are_of_the_size_and_the_divergence_is_k3():
    difference_M = np.log([0.5, 2.0, 1.0, 1.0])
    figures = Compared(difference_M, np.array([0, 1, LATE, LATE]), np.array([1, 1, 2, 2])).figures()
    assert figures["max"] == pytest.approx(np.log(2))
    assert figures["mean"] == pytest.approx(np.log(2) / 2)
    assert figures["kl"] == pytest.approx((0.5 - 1 + np.log(2) + 2 - 1 - np.log(2)) / 4)
    assert figures["late_over_early"] == figures["later_over_first"] == 0
    assert figures.keys() == METRICS.keys()


def test_the_bench_on_a_real_engine_and_a_real_learner(tmp_path: Path) -> None:
    arguments = ["mismatch", "rounds=1", "trajectories=4", "pairs=float32/float32"]
    surroundings = {"cwd": ROOT, "env": {**os.environ, "TMPDIR": str(tmp_path)}}
    command = [sys.executable, "-m", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, **surroundings)
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(done.stdout.splitlines()[-1])["figures"]["float32/float32"]["max"] < 1e-3
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []
