"""The bench of the sandbox: what it calls overhead and floor, and that answers of others are noticed."""

import pytest

from bench.benches.sandbox.calls import PLAIN_FORK, figures
from bench.benches.sandbox.contenders import CASES, Sample
from bench.benches.sandbox.load import burst


def sample(cpu_s: float, host_cpu_s: float = 0.0) -> Sample:
    return Sample(calls=100, wrong=0, cpu_s=cpu_s, wall_s=1.0, host_cpu_s=host_cpu_s)


def test_overhead_is_told_with_and_without_the_host_and_the_floor_of_both_forks() -> None:
    tier = CASES[0].tier.name
    samples = {
        ("rocstar", "print"): sample(3.0, 0.6),
        (PLAIN_FORK, "print"): sample(2.0),
        (f"fork + exit, {tier}", "print"): sample(1.0),
        (f"os.fork + exit, {tier}", "print"): sample(1.5),
        ("elsewhere", "print"): sample(float("nan")),
    }
    rows = figures(samples, "rocstar")
    ours = rows["print/rocstar"]
    assert (ours["jail"], ours["jail_and_host"]) == pytest.approx((0.2, 0.5))
    assert (ours["over_fork"], ours["over_os_fork"]) == pytest.approx((3.0, 2.0))
    assert rows[f"print/{PLAIN_FORK}"]["over_ours"] == pytest.approx(2 / 3)
    assert rows["print/elsewhere"] == {"wrong": 0}, "CPU of another machine is not known"


async def test_swapped_answers_are_lost_ones() -> None:
    async def run(code: str) -> str:
        return {"print(0)": "0\n", "print(1)": "2\n", "print(2)": "1\n"}[code]

    assert (await burst(run, 3)).lost == 2
