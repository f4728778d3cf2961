"""How long the replicas were nearly empty, and what was missing."""

import pytest

from engine.telemetry.occupancy import Occupancy


@pytest.mark.parametrize(
    ("running", "tools", "blocked", "starved_s", "tail_s"),
    [
        (16, 0, 0, 0, 0),
        (3, 0, 0, 0, 0),  # more than an eighth
        (2, 0, 0, 0, 5),
        (2, 1, 0, 0, 5),
        (2, 2, 0, 5, 0),
        (0, 1, 0, 5, 0),
        (0, 14, 0, 5, 0),
        (0, 0, 0, 0, 0),  # nothing is under way
        (2, 0, 1, 0, 0),  # those that wait for a place would run
    ],
)
def test_few_requests_are_a_tail_or_starved_by_tools(running, tools, blocked, starved_s, tail_s):
    occupancy = Occupancy()
    occupancy.change(1.0, running=16)
    occupancy.change(2.0, running=running - 16, tools=tools, blocked=blocked)
    occupancy.advance(7.0)
    assert (occupancy.starved_s, occupancy.tail_s) == (starved_s, tail_s)


def test_few_is_measured_by_the_most_of_the_same_step():
    occupancy = Occupancy()
    occupancy.change(0.0, running=16)
    occupancy.change(1.0, running=-15)
    occupancy.begin(4.0)
    occupancy.advance(9.0)
    assert occupancy.tail_s == 0.0, "one is all that ran"
    occupancy.change(9.0, running=8)
    occupancy.change(9.0, running=-8)
    occupancy.advance(10.0)
    assert occupancy.tail_s == 1.0
