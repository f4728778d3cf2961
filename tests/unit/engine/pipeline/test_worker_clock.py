"""When a stage works and when it waits."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pipeline.pipeline import Pipeline, Stage
from engine.pipeline.worker_clock import JOINED_S, Period, Periods, WorkerClock
from tests.support.fakes import Clock

WHAT = st.sampled_from(["in", "out", "end in", "end out", "cut"])
STEPS = st.lists(st.tuples(WHAT, st.floats(0.0, 3.0)), max_size=20)


def test_a_period_lasts_while_any_worker_works_and_short_pauses_are_counted_in():
    collected = deque()
    periods = Periods("mine", 2, collected)
    for now, change in ((0.0, 1), (1.0, 1), (2.0, -1), (3.0, -1), (3.0 + JOINED_S / 2, 1), (4.0, -1), (6.0, 1)):
        periods.change(change, now)
    periods.cut(7.0)
    periods.cut(8.0)
    assert list(collected) == [Period("mine", 2, 0.0, 4.0), Period("mine", 2, 6.0, 7.0), Period("mine", 2, 7.0, 8.0)]


def test_an_idle_stage_has_no_period():
    collected = deque()
    periods = Periods("mine", 0, collected)
    periods.cut(1.0)
    periods.change(1, 2.0)
    periods.change(-1, 3.0)
    periods.cut(4.0)
    periods.cut(5.0)
    assert list(collected) == [Period("mine", 0, 2.0, 3.0)]


@given(steps=STEPS)
def test_the_seconds_of_a_worker_sum_to_its_life_and_its_periods_to_its_work(steps):
    clock, collected = Clock(), deque()
    periods = Periods("mine", 0, collected)
    worker, waits, began = WorkerClock(clock, periods), {"in": 0, "out": 0}, clock()
    for what, seconds in steps:
        clock.now += seconds
        side = what.removeprefix("end ")
        if what == "cut":
            periods.cut(clock())
        elif what == side or waits[side]:
            change = 1 if what == side else -1
            waits[side] += change
            (worker.waits_for_input if side == "in" else worker.waits_for_room)(change)
    worker.end()
    ended = clock()
    clock.now += 1.0
    periods.cut(clock())
    found = worker.seconds()
    assert abs(sum(found.values()) - (ended - began)) < 1e-6
    counted = sum(period.end - period.start for period in collected)
    assert -1e-6 < counted - found["busy"] < JOINED_S * len(steps) + 1e-6
    assert all(a.end <= b.start for a, b in zip(collected, list(collected)[1:], strict=False))


async def test_waiting_inside_a_port_is_no_work():
    clock = Clock()

    async def waits(inbox, outbox):
        clock.now += 1.0
        with inbox.waiting():
            clock.now += 5.0
        clock.now += 2.0
        await outbox.put(1)

    pipeline = Pipeline([Stage(name="mine", run=waits)], clock)
    await pipeline.run()
    [row] = pipeline.stats()
    assert (row.busy_s, row.blocked_in_s, row.blocked_out_s) == (3.0, 5.0, 0.0)
    assert [(period.stage, period.end - period.start) for period in pipeline.drain_periods()] == [
        ("mine", 1.0),
        ("mine", 2.0),
    ]
    assert pipeline.drain_periods() == []


async def test_it_is_told_when_a_stage_works_also_when_it_fails():
    told = []

    async def source(inbox, outbox):
        await outbox.put(1)
        await outbox.put(2)

    async def fails(inbox, outbox):
        async for item in inbox:
            if item == 2:
                raise ZeroDivisionError

    stages = [Stage(name="source", run=source), Stage(name="mine", run=fails, workers=2)]
    pipeline = Pipeline(stages, works=lambda stage, does: told.append((stage, does)))
    with pytest.raises(ZeroDivisionError):
        await pipeline.run()
    for stage in ("source", "mine"):
        own = [does for name, does in told if name == stage]
        assert own == [number % 2 == 0 for number in range(len(own))], "each beginning has an end"
        assert len(own) % 2 == 0
        assert own
