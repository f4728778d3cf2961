"""Constants are found in a record of engine steps, and a replay with them takes as long as the recorded run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.benches.fleet import fleet
from bench.benches.sim_fleet import live as sim_live
from bench.benches.sim_fleet import sim_fleet
from bench.placement import workload
from bench.simulator.costs import Costs, Machine, fit
from bench.simulator.fleet import Simulation
from engine.replica.port import KvSample

TRUE = Costs(o=4e-3, b=2e-4, c=2e-7, d=130e-6)
POLICIES = ("round_robin", "cap12")


class Recorded:
    """A policy that notes each sample."""

    def __init__(self, policy, lines: list[dict], of: dict) -> None:
        self._policy, self._lines, self._of = policy, lines, of

    def sample(self, replica: int, sample: KvSample, now: float) -> None:
        names = ("free_blocks", "running", "waiting", "preempted", "prefilled")
        self._lines.append(self._of | {"replica": replica, "t": now} | {name: getattr(sample, name) for name in names})
        self._policy.sample(replica, sample, now)

    def __getattr__(self, name: str):
        return getattr(self._policy, name)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the live bench writes it, of engines whose constants are known."""
    engine = fleet.ENGINE
    machine = Machine(blocks=engine.blocks, block_size=engine.block_size, costs=TRUE, max_num_seqs=engine.max_num_seqs)
    lines: list[dict] = []
    for number, (kind, policy) in enumerate((kind, policy) for kind in ("math8k", "agentic") for policy in POLICIES):
        rows = workload.load(fleet.TRACES / f"{kind}.101.jsonl.gz")
        of = {"run": number, "kind": kind, "seed": 101, "policy": policy}
        balancer = Recorded(fleet.POLICIES[policy](2000), lines, of)
        Simulation(balancer, rows, machine, 2, longest_segment=1, tick_s=0.0).run()
    path = tmp_path_factory.mktemp("live") / "record.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_replay_takes_as_long_as_the_record(record: Path) -> None:
    runs = sim_live.read(record)
    assert [(run.kind, run.policy) for run in runs] == [
        (kind, name) for kind in ("math8k", "agentic") for name in POLICIES
    ]
    machine, found = sim_live.calibrated(runs)
    assert found.r2 > 0.98
    assert machine.costs.d == pytest.approx(TRUE.d, rel=0.02)
    assert machine.costs.o == pytest.approx(TRUE.o, rel=0.1)
    compared = sim_live.compare(runs, machine)
    assert len(compared) == 4
    for row in compared:
        assert row.ratio == pytest.approx(1, abs=0.06), row  # a preemption more or less is chance
        assert row.simulated.prefilled_tokens == pytest.approx(row.live.prefilled_tokens, rel=0.1)
        assert row.simulated.steps == pytest.approx(row.live.steps, rel=0.08)
        assert row.live.slow == pytest.approx(1, abs=0.02)


def test_a_slow_hour_of_the_machine_is_told_from_the_policy(record: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    slowed = [line | {"t": line["t"] * (2 if line["run"] == 1 else 1)} for line in lines]
    path = tmp_path / "record.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in slowed))
    runs = sim_live.read(path)
    compared = sim_live.compare(runs, sim_live.calibrated(runs)[0])
    assert max(abs(row.ratio - 1) for row in compared) > 0.2
    assert max(abs(row.steady_ratio - 1) for row in compared) < 0.08


def test_the_bench_reports_the_comparison(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sim_fleet.main(["--calibrate", str(record)])
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    assert metrics["worst_deviation"] < 0.06 > metrics["worst_deviation_steady"]
    assert metrics["live_ratio"].keys() == {f"{kind} {name}" for kind in ("math8k", "agentic") for name in POLICIES}
    assert metrics["costs_s"].keys() == {"o", "b", "c", "d"}


def test_a_fit_leaves_outliers_out_but_keeps_their_time() -> None:
    rng = np.random.default_rng(0)
    features = np.column_stack(
        [np.ones(2000), rng.integers(1, 40, 2000), rng.integers(100, 3000, 2000), rng.integers(0, 90, 2000)]
    ).astype(float)
    seconds = features @ np.array([4e-3, 2e-4 + 130e-6, 2e-7, 130e-6]) * (1 + 0.02 * rng.standard_normal(2000))
    clean = fit(features, seconds).costs
    assert (clean.o, clean.b, clean.c, clean.d) == pytest.approx((4e-3, 2e-4, 2e-7, 130e-6), rel=0.15)
    stalls = seconds.copy()
    stalls[::100] += 0.2
    found = fit(features, stalls)
    assert 15 <= found.outliers <= 30
    assert found.costs.d == pytest.approx(130e-6, rel=0.1)
    assert found.costs.o - clean.o == pytest.approx(0.2 / 100, rel=0.2), "20 stalls of 0.2 s over 2000 steps"


def test_a_cost_that_would_be_negative_is_left_out() -> None:
    rng = np.random.default_rng(1)
    features = np.column_stack([np.ones(500), *(rng.integers(1, 50, 500) for _ in range(3))]).astype(float)
    costs = fit(features, features @ np.array([5e-3, 3e-4, -1e-5, 1e-4])).costs
    assert costs.c == 0
    assert costs.o > 0


def test_a_record_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text('{"run": 0, "kind": "math8k"}\n')
    with pytest.raises(ValueError, match=r"record\.jsonl, line 1"):
        sim_live.read(path)
    step = {"run": 0, "kind": "math8k", "seed": 101, "policy": "static", "replica": 0, "t": 0.5, "free_blocks": 9}
    path.write_text(json.dumps(step | {"running": 1, "waiting": 0, "preempted": 0, "prefilled": 0}) + "\n")
    with pytest.raises(ValueError, match="needs 100 steps of busy engines, got 0"):
        sim_live.calibrated(sim_live.read(path))
