"""The idle clock: every second of every replica has exactly one cause."""

from copy import copy
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.telemetry.idle_clock import CAUSES, IdleClock

FLAGS = ("weight_sync", "kv_blocked", "staleness_gate", "reward")
events = st.tuples(st.sampled_from(["run", "tool", "flag"]), st.integers(0, 3), st.booleans(), st.floats(0, 5))


class Eager(IdleClock):
    """Accounts at every event, not only where a count leaves or reaches zero."""

    def _count(self, before, change, now):
        self._tick(now)


@given(st.lists(events, max_size=40))
def test_busy_and_causes_sum_to_the_time_observed(events):
    clock, eager, counts = IdleClock(), Eager(), {}
    for index in (0, 1):
        clock.replica(index, float(index))
        eager.replica(index, float(index))
    now = 1.0
    for kind, number, up, seconds in events:
        now += seconds
        key = (kind, number % 2 if kind != "flag" else number)
        change = 1 if up or not counts.get(key) else -1
        counts[key] = counts.get(key, 0) + change
        for each in (clock, eager):
            if kind == "run":
                each.running(number % 2, change, now)
            elif kind == "tool":
                each.tools(number % 2, change, now)
            else:
                each.flag(FLAGS[number], change, now)
    found = clock.seconds(now + 2)
    assert sum(found[0].values()) == pytest.approx(now + 2)
    assert sum(found[1].values()) == pytest.approx(now + 1)
    for index, causes in eager.seconds(now + 2).items():
        for cause in causes.keys() | found[index].keys():
            assert found[index].get(cause, 0) == pytest.approx(causes.get(cause, 0)), cause
    assert {cause for causes in found.values() for cause in causes} <= {"busy", *CAUSES}


@pytest.mark.parametrize(
    ("states", "cause"),
    [
        ([], "host"),
        (["stage"], "stage"),
        (["stage", "reward"], "reward"),
        (["reward", "staleness_gate"], "staleness_gate"),
        (["reward", "staleness_gate", "other"], "long_tail"),
        (["reward", "staleness_gate", "other tool"], "long_tail"),
        (["staleness_gate", "other", "tool"], "tool_wait"),
        (["tool", "other", "kv_blocked"], "kv_blocked"),
        (["tool", "kv_blocked", "weight_sync", "other"], "weight_sync"),
        (["weight_sync", "running", "tool"], "busy"),
    ],
)
def test_the_first_cause_that_holds_counts(states, cause):
    clock = IdleClock()
    clock.replica(0, 0.0)
    clock.replica(1, 0.0)
    for state in states:
        if state == "other":
            clock.running(1, 1, 0.0)
        elif state == "other tool":
            clock.tools(1, 1, 0.0)
        elif state == "running":
            clock.running(0, 1, 0.0)
        elif state == "tool":
            clock.tools(0, 1, 0.0)
        else:
            clock.flag(state, 1, 0.0)
    assert {name: seconds for name, seconds in clock.seconds(3.0)[0].items() if seconds} == {cause: 3.0}


def test_a_replica_that_is_replaced_keeps_its_history():
    clock = IdleClock()
    clock.replica(0, 0.0)
    clock.running(0, 1, 1.0)
    clock.running(0, -1, 3.0)
    clock.replica(0, 10.0)
    assert clock.seconds(11.0)[0] == {"host": 9.0, "busy": 2.0}


def test_an_unknown_cause_is_refused():
    with pytest.raises(KeyError):
        IdleClock().flag("tool_wait", 1, 0.0)


@given(st.lists(events, max_size=40), st.integers(0, 40))
def test_intervals_follow_one_another_and_add_up_to_the_seconds_of_their_causes(events, drained_after):
    clock, counts, now, found = IdleClock(), {}, 0.0, []
    for index in (0, 1):
        clock.replica(index, 0.0)
    for number, (kind, which, up, seconds) in enumerate(events):
        now += seconds
        key = (kind, which % 2 if kind != "flag" else which)
        change = 1 if up or not counts.get(key) else -1
        counts[key] = counts.get(key, 0) + change
        if kind == "run":
            clock.running(which % 2, change, now)
        elif kind == "tool":
            clock.tools(which % 2, change, now)
        else:
            clock.flag(FLAGS[which], change, now)
        if number == drained_after:
            found += map(copy, clock.drain(now))  # what is drained is written: it must not grow afterwards
    found += clock.drain(now + 1)
    for replica, seconds in clock.seconds(now + 1).items():
        mine = [each for each in found if each.replica == replica]
        assert mine[0].start == 0.0
        assert mine[-1].end == now + 1
        assert all(before.end == after.start for before, after in pairwise(mine))
        for cause, total in seconds.items():
            assert sum(each.end - each.start for each in mine if each.cause == cause) == pytest.approx(total)
    assert clock.drain(now + 1) == []
