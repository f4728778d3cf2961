"""The bench of the sandbox: what it calls overhead and floor, and that answers of others are noticed."""

import pytest

from bench.benches.sandbox.calls import metrics
from bench.benches.sandbox.contenders import CASES, Sample
from bench.benches.sandbox.load import burst


def sample(cpu_s: float, host_cpu_s: float = 0.0) -> Sample:
    return Sample(calls=100, wrong=0, cpu_s=cpu_s, wall_s=1.0, host_cpu_s=host_cpu_s)


def test_overhead_is_told_with_and_without_the_host_and_the_floor_of_both_forks() -> None:
    tier = CASES[0].tier.name
    measured = {
        ("rocstar", "a"): [sample(3.0, 0.6)],
        ("plain fork, same image", "a"): [sample(2.0)],
        (f"fork + exit, {tier}", "a"): [sample(1.0)],
        (f"os.fork + exit, {tier}", "a"): [sample(1.5)],
    }
    found = metrics(measured, "rocstar", [])
    assert found["isolation_overhead_a"] == pytest.approx(0.2)
    assert found["isolation_overhead_with_host_a"] == pytest.approx(0.5)
    assert (found["fork_floor_ratio_a"], found["os_fork_floor_ratio_a"]) == pytest.approx((3.0, 2.0))


async def test_swapped_answers_are_lost_ones() -> None:
    async def run(code: str) -> str:
        return {"print(0)": "0\n", "print(1)": "2\n", "print(2)": "1\n"}[code]

    assert (await burst(run, 3)).lost == 2
