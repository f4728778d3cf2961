"""The bench of the recording: which steps are compared, and what its figures are."""

import pytest

from bench.benches.recording import METRICS, SKIP, Pairs, Step


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


def kept(steps):
    rounds = []
    pairs = Pairs(rounds.append)
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
    on = a_step(recorded=True, cpu_s=1.1, loop_s=0.001, thread_s=0.010, bytes=2048)
    [figures] = kept([a_step(recorded=False), on])
    assert figures["cpu_ratio"] == pytest.approx(1.1)
    assert figures["direct_share"] == pytest.approx(0.01)
    assert (figures["loop_s"], figures["step_bytes"]) == (0.001, 2048)
    assert figures.keys() == METRICS.keys()
