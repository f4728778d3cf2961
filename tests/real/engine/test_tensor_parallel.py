"""A replica of two processes on the CPU: tests/support/tensor_parallel.py, and the quick start with one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.runs import SMALL, Run, command, metrics
from tests.support.tensor_parallel import shared_memory

pytestmark = [pytest.mark.timeout(400), pytest.mark.alone]


@pytest.mark.parametrize("transfer", ["gloo", pytest.param("shm", marks=pytest.mark.campaign)])
def test_two_processes_are_one_replica(transfer):
    command = [sys.executable, "-m", "tests.support.tensor_parallel", transfer]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["workers"] == result["sessions"] == 2, "no Ctrl-C of the terminal's reaches them"
    assert result["open_to_others"] == []
    assert result["moved"] > 1e-3 > 1e-5 > result["canary_max_abs"], "old weights would not pass"
    assert result["off"] < 1e-4, "what was sampled has the log-probabilities that the canary's way gives"
    assert (result["deaths"], result["processes"]) == (1, 2), "the death of one process is the replica's"
    assert result["asked"] == [0, 1, 1], "the replacement got the weights and passed the canary"
    assert result["same"], "and samples the same"
    assert result["named"] == result["left"] == result["shared_memory"] == []


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)], ids=["ctrl-c", "kill -9"]
)
def test_adapters_go_to_both_processes_and_an_end_leaves_nothing(
    started: list[Run], tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    before = shared_memory()
    options = ["replicas=1", "tensor_parallel=2", "adapters=true", "learner.lora_rank=4", "lr=0.003", "steps=1000"]
    run = Run(command(tmp_path, *SMALL, *options))
    started.append(run)
    run.until("step   2")
    os.killpg(run.process.pid, sent)  # as a terminal does: to the whole foreground process group
    assert run.end() == code, run.text()
    assert "Traceback" not in run.text()
    assert len(run.seen) >= 4, "learner, engine and its two processes"
    assert run.left() == []
    assert shared_memory() <= before
    assert 0 < metrics(tmp_path / "quickstart")[-1]["canary/max_abs"] < 1e-4
