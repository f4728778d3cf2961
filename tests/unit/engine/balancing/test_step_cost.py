"""Costs of steps are found again from steps of known costs."""

import numpy as np
import pytest

from engine.balancing.step_cost import LearntStepCost
from engine.replica.port import KvSample


def fed(steps, *, noise=0.0, jump=1, replicas=2):
    """Steps of 5 ms + 0.1 ms a request + 50 us a prefilled token."""
    costs, rng = LearntStepCost(), np.random.default_rng(0)
    now = [0.0] * replicas
    for number in range(steps):
        replica = number % replicas
        running = int(rng.integers(1, 200))
        prefilled = int(rng.integers(0, 1000)) if number % 3 == 0 else 0
        now[replica] += jump * (5e-3 + 1e-4 * running) + 5e-5 * prefilled
        now[replica] += noise * rng.exponential()
        costs.sample(replica, KvSample(0, running, 0, 0, prefilled, jump), now[replica])
    return costs


def test_costs_are_found_again():
    costs = fed(1000)
    assert costs.step_s(100) == pytest.approx(15e-3, rel=1e-3)
    assert costs.prefill_s(10_000) == pytest.approx(0.5, rel=1e-3)


def test_under_noise_too_and_from_samples_that_stand_for_several_steps():
    assert fed(4000, noise=2e-3).prefill_s(10_000) == pytest.approx(0.5, rel=0.05)
    costs = fed(1000, jump=8)
    assert costs.step_s(100) == pytest.approx(15e-3, rel=1e-2)
    assert costs.prefill_s(10_000) == pytest.approx(0.5, rel=1e-2)


def test_nothing_is_said_before_enough_was_seen():
    costs = fed(60)
    assert costs.step_s(1) is None
    assert costs.prefill_s(1) is None
    only_decoding = LearntStepCost()
    for number in range(200):
        only_decoding.sample(0, KvSample(0, 3, 0, 0), 0.1 * number)
    assert only_decoding.step_s(3) is None, "the cost of a prefill is not known"


def test_the_first_step_after_idle_time_does_not_count():
    costs, now = LearntStepCost(), 0.0
    for number in range(400):
        for running, step_s in [(4, 0.01), (4, 0.01), (0, 0.01)]:
            now += step_s
            costs.sample(0, KvSample(0, running, 0, 0, 7 * (number % 2)), now)
        now += 0.05  # nothing to do
    assert costs.step_s(4) == pytest.approx(0.01, rel=0.01)


def test_idle_time_pauses_and_other_replicas_do_not_count():
    costs = fed(1000)
    before = costs.step_s(100), costs.prefill_s(1000)
    costs.sample(0, KvSample(0, 0, 0, 0), 1e3)
    costs.sample(0, KvSample(0, 5, 0, 0), 2e3)
    costs.sample(1, KvSample(0, 5, 0, 0), 3e3)
    costs.forget(1)
    costs.sample(1, KvSample(0, 5, 0, 0), 4e3)
    for number in range(100):
        costs.sample(0, KvSample(0, 5, 0, 0), 2e3 + 0.0055 * number)
    assert (costs.step_s(100), costs.prefill_s(1000)) == pytest.approx(before, rel=0.05)
