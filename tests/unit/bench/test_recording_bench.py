"""The bench of the recording: which steps are compared, and what its figures are."""

import inspect
from itertools import islice

import pytest

from bench.benches.recording import ENOUGH, METRICS, SKIP, Pairs, Step, Switch, order_of_pairs, twice
from bench.measuring.bench import BenchFailed
from engine.recording.recording import Recording


def a_step(*, recorded, wall_s=1.0, cpu_s=1.0, loop_s=0.0, thread_s=0.0):
    return Step(
        recorded=recorded,
        wall_s=wall_s,
        cpu_s=cpu_s,
        node_s=0.5,
        learn_s=0.5,
        loop_s=loop_s,
        thread_s=thread_s,
    )


def kept(steps, others=lambda: 0.0):
    rounds = []
    pairs = Pairs(rounds.append, others)
    for step in [a_step(recorded=True, wall_s=9.0)] * SKIP + steps:
        pairs.add(step)
    return [figures[""] for figures in rounds]


def test_a_pair_is_a_recorded_step_and_its_neighbour_in_whatever_order():
    on, off = a_step(recorded=True, wall_s=1.2), a_step(recorded=False)
    assert [figures["wall_ratio"] for figures in kept([on, off, off, on])] == [1.2, 1.2]


def test_a_step_without_a_neighbour_does_not_count():
    on, off = a_step(recorded=True), a_step(recorded=False)
    assert len(kept([on, off, off])) == 1


def test_the_direct_figures_are_those_of_the_recorded_step():
    on = a_step(recorded=True, cpu_s=1.1, loop_s=0.001, thread_s=0.010)
    [figures] = kept([a_step(recorded=False), on])
    assert figures["cpu_ratio"] == pytest.approx(1.1)
    assert figures["direct_share"] == pytest.approx(0.01)
    assert figures["loop_s"] == 0.001
    assert figures.keys() == METRICS.keys()


def test_a_pair_beside_which_others_used_the_machine_does_not_count():
    on, off = a_step(recorded=True), a_step(recorded=False)
    shares = iter([0.9, 0.9, 0.0, None])  # the pair that warms up, and three
    assert len(kept([on, off, off, on, on, off], lambda: next(shares))) == 2


def test_a_machine_that_is_never_quiet_ends_the_bench():
    pair = [a_step(recorded=True), a_step(recorded=False)]
    with pytest.raises(BenchFailed, match="10 of 10"):
        kept(pair * ENOUGH, lambda: 0.9)


def test_of_two_pairs_one_begins_with_the_recorded_step():
    steps = list(islice(order_of_pairs(seed=0), 40))
    quartets = [steps[n : n + 4] for n in range(0, 40, 4)]
    assert all(a != b and c != d and a != c for a, b, c, d in quartets)
    assert {quartet[0] for quartet in quartets} == {True, False}


def test_the_steps_of_a_pair_have_the_same_prompts():
    assert list(islice(twice(iter(range(9)), 2), 8)) == [0, 1, 0, 1, 2, 3, 2, 3]


@pytest.mark.parametrize("method", ["begin", "trained", "cut"])
def test_the_switch_is_called_as_the_recording_is(method):
    assert inspect.signature(getattr(Switch, method)) == inspect.signature(getattr(Recording, method))
