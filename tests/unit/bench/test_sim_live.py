"""Constants are found in a record of engine steps, and a replay with them takes as long as the recorded run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.benches import sim_live
from bench.benches.fleet import fleet
from bench.benches.fleet.replay import Step
from bench.placement import workload
from bench.placement.policies import POLICIES as MADE
from bench.simulator.fit import features, fitted
from bench.simulator.fleet import Simulation
from bench.simulator.machine import Machine
from engine.balancing.step_cost import StepCost
from engine.replica.port import KvSample

TRUE = StepCost(fixed_s=4e-3, per_request_s=330e-6, per_kv_token_s=2e-7, per_token_s=130e-6)
POLICIES = ("round_robin", "cap")


class Recorded:
    """A policy that notes each sample."""

    def __init__(self, policy, lines: list[dict], of: dict) -> None:
        self._policy, self._lines, self._of = policy, lines, of

    def sample(self, replica: int, sample: KvSample, now: float) -> None:
        names = ("free_blocks", "running", "waiting", "preempted", "prefilled", "steps")
        self._lines.append(self._of | {"replica": replica, "t": now} | {name: getattr(sample, name) for name in names})
        self._policy.sample(replica, sample, now)

    def __getattr__(self, name: str):
        return getattr(self._policy, name)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the live bench writes it, of engines whose constants are known."""
    engine = fleet.ENGINE
    machine = Machine(blocks=engine.blocks, block_size=engine.block_size, cost=TRUE, max_num_seqs=engine.max_num_seqs)
    lines: list[dict] = []
    for number, (kind, policy) in enumerate((kind, policy) for kind in ("math8k", "agentic") for policy in POLICIES):
        rows = workload.load(fleet.TRACES / f"{kind}.101.jsonl.gz")
        of = {"run": number, "kind": kind, "seed": 101, "policy": policy}
        balancer = Recorded(MADE[policy](fleet.setting_of(rows)), lines, of)
        Simulation(balancer, rows, machine, 2, longest_segment=1, tick_s=0.0).run()
    path = tmp_path_factory.mktemp("live") / "record.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def compared(path: Path) -> list[dict[str, float]]:
    runs = sim_live.read(path)
    machine, _ = sim_live.calibrated(runs)
    return [sim_live.compared(run, machine) for run in runs]


def test_a_replay_takes_as_long_as_the_record(record: Path) -> None:
    runs = sim_live.read(record)
    assert [(run.kind, run.policy) for run in runs] == [
        (kind, name) for kind in ("math8k", "agentic") for name in POLICIES
    ]
    machine, fit = sim_live.calibrated(runs)
    assert fit.r2 > 0.98
    assert machine.cost.per_token_s == pytest.approx(TRUE.per_token_s, rel=0.02)
    assert machine.cost.fixed_s == pytest.approx(TRUE.fixed_s, rel=0.1)
    for row in compared(record):
        assert row["ratio"] == pytest.approx(1, abs=0.06), row  # a preemption more or less is chance
        assert row["steady_ratio"] == pytest.approx(row["ratio"], abs=0.02)


def test_a_slow_hour_of_the_machine_is_told_from_the_policy(record: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    slowed = [line | {"t": line["t"] * (2 if line["run"] == 1 else 1)} for line in lines]
    path = tmp_path / "record.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in slowed))
    rows = compared(path)
    assert max(abs(row["ratio"] - 1) for row in rows) > 0.2
    assert max(abs(row["steady_ratio"] - 1) for row in rows) < 0.12


def test_a_round_of_the_bench_is_a_live_run_of_each_policy_and_workload(record: Path) -> None:
    rounds: list = []
    sim_live.measure(sim_live.Options(record=record), rounds.append)
    [figures] = rounds
    assert figures.keys() == {f"{kind}/{name}" for kind in ("math8k", "agentic") for name in POLICIES} | {"fit"}
    assert all(of.keys() <= sim_live.METRICS.keys() for of in figures.values())


def test_a_fit_leaves_outliers_out_but_keeps_their_time() -> None:
    rng = np.random.default_rng(0)
    rows = np.column_stack(
        [np.ones(2000), rng.integers(1, 40, 2000), rng.integers(100, 3000, 2000), rng.integers(0, 90, 2000)]
    ).astype(float)
    seconds = rows @ np.array([4e-3, 330e-6, 2e-7, 130e-6]) * (1 + 0.02 * rng.standard_normal(2000))
    clean = fitted(rows, seconds).cost
    constants = (clean.fixed_s, clean.per_request_s, clean.per_kv_token_s, clean.per_token_s)
    assert constants == pytest.approx((4e-3, 330e-6, 2e-7, 130e-6), rel=0.15)
    stalls = seconds.copy()
    stalls[::100] += 0.2
    fit = fitted(rows, stalls)
    assert 15 <= fit.outliers <= 30
    assert fit.cost.per_token_s == pytest.approx(130e-6, rel=0.1)
    assert fit.cost.fixed_s - clean.fixed_s == pytest.approx(0.2 / 100, rel=0.2), "20 stalls of 0.2 s over 2000 steps"


def test_a_cost_that_would_be_negative_is_left_out() -> None:
    rng = np.random.default_rng(1)
    rows = np.column_stack([np.ones(500), *(rng.integers(1, 50, 500) for _ in range(3))]).astype(float)
    cost = fitted(rows, rows @ np.array([5e-3, 3e-4, -1e-5, 1e-4])).cost
    assert cost.per_kv_token_s == 0
    assert cost.fixed_s > 0
    with pytest.raises(ValueError, match="at least 10 steps"):
        fitted(rows[:5], np.ones(5))


def test_steps_that_were_told_together_took_equal_parts_of_their_time() -> None:
    told = [Step(0, 1.0, 98, 3, 0, 0, 0), Step(0, 1.6, 97, 4, 0, 0, 30, steps=3)]
    rows_N4, seconds_N = features([told], blocks=99, block_size=32)
    assert rows_N4.tolist() == [[1.0, 3.0, 32.0, 10.0]] * 3
    assert seconds_N == pytest.approx([0.2] * 3)


def test_a_record_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text('{"run": 0, "kind": "math8k"}\n')
    with pytest.raises(ValueError, match=r"record\.jsonl, line 1"):
        sim_live.read(path)
    step = {"run": 0, "kind": "math8k", "seed": 101, "policy": "static", "replica": 0, "t": 0.5, "free_blocks": 9}
    path.write_text(json.dumps(step | {"running": 1, "waiting": 0, "preempted": 0, "prefilled": 0, "steps": 1}) + "\n")
    with pytest.raises(ValueError, match="100 steps of busy engines, got 0"):
        sim_live.calibrated(sim_live.read(path))
