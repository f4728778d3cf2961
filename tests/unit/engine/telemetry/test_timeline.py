"""The timeline: what happened until it is taken away, thinned and bounded; spans of one lane never overlap."""

import asyncio
import contextlib
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.replica.port import KvSample
from engine.telemetry import timeline as module
from engine.telemetry.timeline import BUCKET_S, Lanes, Timeline
from tests.support.fakes import Clock


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=60))
def test_a_lane_is_never_given_to_two_owners_and_the_lowest_free_one_is_used(events):
    lanes, out, seen = Lanes(), set(), 0
    for take, number in events:
        if take or not out:
            lane = lanes.take()
            assert lane not in out
            assert lane == min(set(range(len(out) + 1)) - out)
            out.add(lane)
            seen = max(seen, len(out))
            assert lane < seen
        else:
            lane = sorted(out)[number % len(out)]
            out.remove(lane)
            lanes.give(lane)


def test_what_is_drained_was_since_the_last_time():
    clock = Clock(100.0)
    timeline = Timeline(clock)
    timeline.span("trajectories", "generate", 100.25, 100.75, 2, key=7, end=0.5)  # a loss may count what it likes
    timeline.instant("fleet", "replica 0 up", pid=17)
    clock.now = 101.0
    timeline.lag(0.25)
    first = timeline.drain()
    assert (first.start, first.end) == (100.0, 101.0)
    [span], [instant], [lag] = first.spans, first.instants, first.lags
    assert tuple(span) == ("trajectories", 2, "generate", 100.25, 100.75, {"key": 7, "end": 0.5})
    assert tuple(instant) == ("fleet", 100.0, "replica 0 up", {"pid": 17})
    assert tuple(lag) == (101.0, 0.25)
    clock.now = 102.0
    second = timeline.drain()
    assert (second.start, second.end) == (101.0, 102.0)
    assert [*second.spans, *second.instants, *second.lags, *second.steps] == []


def test_all_that_a_process_records_has_one_axis_which_is_the_time_of_day():
    first, second = Timeline(), Timeline()
    times = [first.now(), second.now(), first.drain().end, second.drain().end]
    assert times == sorted(times)
    assert abs(first.now() - time.time()) < 60


def test_engine_steps_are_thinned_to_the_largest_of_a_moment_and_sums():
    clock = Clock()
    timeline = Timeline(clock)
    for used, running in ((3, 5), (9, 4), (6, 2)):
        timeline.step(0, used, KvSample(free_blocks=88, running=running, waiting=1, preempted=1, prefilled=10))
        clock.now += BUCKET_S / 4
    timeline.step(1, 1, KvSample(free_blocks=88, running=1, waiting=0, preempted=0))
    clock.now = BUCKET_S
    timeline.step(0, 2, KvSample(free_blocks=88, running=1, waiting=0, preempted=0))
    rows = [
        (step.replica, step.used_blocks, step.running, step.preempted, step.prefilled, step.steps)
        for step in timeline.drain().steps
    ]
    assert rows == [(0, 9, 5, 3, 30, 3), (1, 1, 1, 0, 0, 1), (0, 2, 1, 0, 0, 1)]


def test_memory_is_bounded_where_nobody_drains():
    timeline = Timeline(Clock())
    for number in range(module.EVENTS + 10):
        timeline.span("reward", str(number), 0.0, 1.0)
    events = timeline.drain()
    assert len(events.spans) == module.EVENTS
    assert events.spans[0].name == "10"
    assert events.dropped == 10, "what is not kept is counted"
    assert timeline.drain().dropped == 0


def test_a_track_that_does_not_exist_is_refused_when_it_is_used():
    timeline = Timeline(Clock())
    with pytest.raises(KeyError, match="trajectory"):
        timeline.span("trajectory", "x", 0.0, 1.0)
    with pytest.raises(KeyError, match="nowhere"):
        timeline.instant("nowhere", "x")


async def test_spans_of_one_lane_do_not_overlap_in_a_run_of_many_rollouts():
    from tests.support.node import ANSWER, END, Setup, call

    text = call("print(1)") + call("print(2)") + END
    async with Setup([text], [text], [ANSWER], replicas=2) as node, asyncio.TaskGroup() as group:
        for _ in range(12):
            group.create_task(node.run())
    lanes = {}
    for span in node.timeline.drain().spans:
        lanes.setdefault((span.track, span.lane), []).append((span.start, span.end))
    assert sum(len(spans) for spans in lanes.values()) == 12 * (3 + 2 + 4)
    for lane, spans in lanes.items():
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start, (lane, spans)


def test_an_idle_cause_ends_with_what_it_covers_also_when_that_fails():
    clock = Clock()
    timeline = Timeline(clock)
    timeline.idle.replica(0, clock())
    with contextlib.suppress(ZeroDivisionError), timeline.idle_cause("kv_blocked"):
        clock.now += 2.0
        raise ZeroDivisionError
    clock.now += 3.0
    assert timeline.idle.seconds(clock.now)[0] == {"kv_blocked": 2.0, "host": 3.0}
    assert [(each.cause, each.start, each.end) for each in timeline.drain().intervals] == [
        ("kv_blocked", 0.0, 2.0),
        ("host", 2.0, 5.0),
    ]
