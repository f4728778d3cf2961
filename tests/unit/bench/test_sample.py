"""A sampled step: smaller, with its longest group, and policies that compare as on the whole one."""

import pytest

from bench.placement.policies import POLICIES, Setting
from bench.placement.workload import Size, generate
from bench.simulator.fleet import Simulation
from bench.simulator.machine import H200
from bench.simulator.sample import sampled

TRACE = generate("math8k", 5, Size(groups=64, samples=8))


def ratio(trace, machine, replicas):
    """How much longer round robin takes than our policy."""
    setting = Setting.of(trace, machine.kv_tokens)
    seconds = [
        Simulation(POLICIES[name](setting), trace, machine, replicas).run().makespan_s
        for name in ("round_robin", "kv_aware")
    ]
    return seconds[0] / seconds[1]


def test_a_small_step_stays_as_it_is():
    assert sampled(TRACE, H200, 2, 512) == (TRACE, H200, 2)


@pytest.mark.parametrize("replicas", [4, 1])
def test_a_sample_keeps_the_longest_group_and_the_load_of_a_replica(replicas):
    trace, machine, fewer = sampled(TRACE, H200, replicas, 128)
    assert len(trace) == 128
    assert [row.traj for row in trace] == list(range(128))
    assert max(row.total_tokens for row in trace) == max(row.total_tokens for row in TRACE)
    before = len(TRACE) / (replicas * H200.blocks)
    assert len(trace) / (fewer * machine.blocks) == pytest.approx(before, rel=0.01)
    half = len(trace) / fewer / (len(TRACE) / replicas)
    assert machine.cost.step_s(100 * half, kv_tokens=1e5 * half) == pytest.approx(H200.cost.step_s(100, kv_tokens=1e5))


def test_policies_compare_on_a_sample_as_on_the_whole_step():
    machine = H200.__class__(blocks=2000, block_size=16, cost=H200.cost)
    whole = ratio(TRACE, machine, 4)
    assert whole > 1.1
    assert ratio(*sampled(TRACE, machine, 4, 256)) == pytest.approx(whole, rel=0.1)
