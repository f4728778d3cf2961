"""The bench of fleets on real engines."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from bench.benches.fleet.fleet import trace_of
from bench.placement.workload import load
from tests.support.paths import ROOT
from tests.support.runs import Run

pytestmark = pytest.mark.campaign  # `make bench` runs them too


@pytest.mark.timeout(1800)  # as slow as the machine may be: nothing here is timed
def test_the_bench_on_real_engines_keeps_its_first_round_when_ctrl_c_ends_the_second(tmp_path: Path) -> None:
    """Two policies, one after the other, on the same engines: 8 trajectories of a group with a prompt of 64 tokens."""
    options = "rounds=9 kinds=uniform policies=kv_aware,round_robin groups=1 record=steps.jsonl"
    options += " deadline_s=600 seeds=101"
    there = ["env", "-C", str(tmp_path), f"PYTHONPATH={ROOT}"]
    run = Run([*there, sys.executable, "-m", "bench", "fleet", *options.split()])
    try:
        run.until("round 2 of 9")
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground process group
        assert run.end() == 130, run.text()
    finally:
        run.end_now()
    assert run.left() == []
    assert "Traceback" not in run.text()
    rows = json.loads(run.text().splitlines()[-1])["figures"]
    longest = max(row.total_tokens for row in load(trace_of("uniform", 101)) if row.group == 0)
    assert rows["round_robin"]["ratio_uniform"] > 0
    for figures in rows.values():
        assert figures["preemptions"] == 0
        # A trajectory that is moved is computed again; when one is moved depends on the speed of the engines.
        assert figures["recomputed_tokens"] <= figures["moves"] * longest
    assert rows["round_robin"]["moves"] == 0
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert {(step["run"], step["policy"]) for step in steps} in (
        {(0, "kv_aware"), (1, "round_robin")},
        {(1, "kv_aware"), (0, "round_robin")},
    )
    assert all(0 <= step["free_blocks"] <= 99 for step in steps)
    assert (tmp_path / "runs" / "bench" / "fleet_uniform.png").exists()
