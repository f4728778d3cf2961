"""The bench of the recording: which steps are compared, and what its shares are of."""

import numpy as np
import pytest

from bench.benches.recording import SKIP, Step, metrics_of, pairs


def a_step(*, recorded, wall_s=1.0, cpu_s=1.0, loop_s=0.0, thread_s=0.0, bytes=0):
    return Step(
        recorded=recorded,
        wall_s=wall_s,
        cpu_s=cpu_s,
        node_s=0.5,
        learn_s=0.5,
        loop_s=loop_s,
        thread_s=thread_s,
        bytes=bytes,
    )


def steps_of(order, **of_recorded):
    warm = [a_step(recorded=True, wall_s=9.0)] * SKIP
    return warm + [a_step(recorded=recorded, **(of_recorded if recorded else {})) for recorded in order]


def test_a_pair_is_a_recorded_step_and_its_neighbour_in_whatever_order():
    found = pairs(steps_of([True, False, False, True]))
    assert [(on.recorded, off.recorded) for on, off in found] == [(True, False), (True, False)]
    assert all(on.wall_s == off.wall_s == 1.0 for on, off in found), "the first steps do not count"


def test_a_step_without_a_neighbour_does_not_count():
    assert len(pairs(steps_of([True, False, False]))) == 1


def test_shares_are_how_much_more_a_recorded_step_takes():
    steps = steps_of([True, False] * 20, wall_s=1.02, cpu_s=1.1, loop_s=0.001, thread_s=0.010, bytes=2048)
    found = metrics_of(steps)
    assert found["wall_share"] == found["wall_share_low"] == pytest.approx(0.02)
    assert found["cpu_share"] == pytest.approx(0.1)
    assert found["direct_share"] == pytest.approx(0.01)
    assert (found["loop_ms"], found["kb_per_step"]) == (pytest.approx(1.0), 2.0)


def test_an_interval_of_noise_covers_zero():
    rng = np.random.default_rng(0)
    steps = steps_of([])
    for _ in range(40):
        steps += [a_step(recorded=True, wall_s=rng.uniform(1, 2)), a_step(recorded=False, wall_s=rng.uniform(1, 2))]
    found = metrics_of(steps)
    assert found["wall_share_low"] < 0 < found["wall_share_high"]
