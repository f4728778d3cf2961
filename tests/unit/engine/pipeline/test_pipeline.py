"""Pipelines: the end travels down, errors come out as they are, seconds add up."""

import asyncio

import pytest

from engine.pipeline.pipeline import Inbox, Outbox, Pipeline, Stage
from tests.support.fakes import Clock, Gate, settle


def source(count):
    async def stage(inbox: Inbox, outbox: Outbox) -> None:
        for n in range(count):
            await outbox.put(n)

    return stage


async def forward(inbox: Inbox, outbox: Outbox) -> None:
    async for item in inbox:
        await outbox.put(item)


def sink(items: list):
    async def stage(inbox: Inbox, outbox: Outbox) -> None:
        async for item in inbox:
            items.append(item)
            await outbox.put(item)

    return stage


async def test_every_item_passes_every_stage_and_the_end_travels_down():
    items = []
    a, b = Stage(name="a", run=source(50)), Stage(name="b", run=forward, capacity=2)
    pipeline = Pipeline([a, b, Stage(name="c", run=sink(items))])
    await pipeline.run()
    assert items == list(range(50))
    passed = [(row.items_in, row.items_out, row.queue) for row in pipeline.stats()]
    assert passed == [(0, 50, 0), (50, 50, 0), (50, 50, 0)]


async def test_workers_share_an_inbox_and_the_outbox_closes_after_the_last_of_them():
    items, gates = [], {n: Gate() for n in range(3)}

    async def hold(inbox: Inbox, outbox: Outbox) -> None:
        async for n in inbox:
            await gates[n].passed()
            await outbox.put(n)

    pipeline = Pipeline(
        [Stage(name="a", run=source(3)), Stage(name="b", run=hold, workers=3), Stage(name="c", run=sink(items))]
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(pipeline.run())
        for gate in gates.values():  # all three are held at once: there are three workers
            await gate.started.wait()
        gates[2].release()
        gates[1].release()
        await settle()
        assert sorted(items) == [1, 2]
        assert not running.done(), "a worker is still at work"
        gates[0].release()
    assert sorted(items) == [0, 1, 2]


async def test_an_exception_cancels_everything_and_comes_out_unwrapped():
    cancelled = []

    async def waits(inbox: Inbox, outbox: Outbox) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("waits")
            raise

    async def fails(inbox: Inbox, outbox: Outbox) -> None:
        await inbox.get()
        raise LookupError("a bug")

    pipeline = Pipeline(
        [Stage(name="a", run=source(9)), Stage(name="b", run=fails, capacity=1), Stage(name="c", run=waits)]
    )
    with pytest.raises(LookupError, match="a bug"):
        await pipeline.run()
    assert cancelled == ["waits"]


async def test_cancelling_the_run_cancels_its_workers():
    gate = Gate()

    async def waits(inbox: Inbox, outbox: Outbox) -> None:
        await gate.passed()

    async with asyncio.TaskGroup() as group:
        running = group.create_task(Pipeline([Stage(name="a", run=waits)]).run())
        await gate.started.wait()
        running.cancel()
    assert running.cancelled()


async def test_a_stage_that_ends_before_its_inbox_does_is_an_error_and_not_a_hang():
    async def takes_one(inbox: Inbox, outbox: Outbox) -> None:
        await inbox.get()

    pipeline = Pipeline([Stage(name="a", run=source(9)), Stage(name="first", run=takes_one, capacity=1)])
    with pytest.raises(RuntimeError, match="stage first ended before its inbox was closed and drained"):
        await pipeline.run()


async def test_busy_and_blocked_seconds_sum_to_the_workers_lives():
    """The middle stage works 3 s on each of 4 items; its neighbours wait for it."""
    clock, gates = Clock(), [Gate() for _ in range(4)]

    async def works(inbox: Inbox, outbox: Outbox) -> None:
        async for n in inbox:
            await gates[n].passed()
            await outbox.put(n)

    pipeline = Pipeline(
        [
            Stage(name="a", run=source(4)),
            Stage(name="b", run=works, capacity=1),
            Stage(name="c", run=sink([])),
        ],
        clock,
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(pipeline.run())
        for gate in gates:
            await gate.started.wait()
            await settle()
            clock.now += 3.0
            lived = clock.now
            for row in pipeline.stats()[1:]:
                assert row.busy_s + row.blocked_in_s + row.blocked_out_s == pytest.approx(lived)
            gate.release()
    a, b, c = pipeline.stats()
    assert (b.busy_s, b.blocked_in_s, b.blocked_out_s) == (12.0, 0.0, 0.0)
    assert (c.busy_s, c.blocked_in_s, c.blocked_out_s) == (0.0, 12.0, 0.0)
    assert (a.busy_s, a.blocked_out_s) == (0.0, 6.0), "one item is with the worker, one in the queue: two waits of 3 s"


async def test_a_stage_may_use_its_ports_from_several_tasks():
    async def fans_out(inbox: Inbox, outbox: Outbox) -> None:
        async with asyncio.TaskGroup() as group:
            for n in range(6):
                group.create_task(outbox.put(n))

    clock, gate, items = Clock(), Gate(), []

    async def slow(inbox: Inbox, outbox: Outbox) -> None:
        await gate.passed()
        await sink(items)(inbox, outbox)

    pipeline = Pipeline([Stage(name="a", run=fans_out), Stage(name="b", run=slow, capacity=1)], clock)
    async with asyncio.TaskGroup() as group:
        group.create_task(pipeline.run())
        await gate.started.wait()
        await settle()
        clock.now += 5.0
        gate.release()
    assert sorted(items) == list(range(6))
    assert pipeline.stats()[0].blocked_out_s == 5.0


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_stages_need_distinct_names(names):
    with pytest.raises(ValueError, match="distinct names"):
        Pipeline([Stage(name=name, run=forward) for name in names])


def test_a_stage_without_workers_is_refused():
    with pytest.raises(ValueError, match="stage a: workers must be at least 1, got 0"):
        Stage(name="a", run=forward, workers=0)


async def test_a_stage_that_has_enough_ends_those_before_it_and_lets_those_after_it_end():
    items, ended = [], []

    async def endless(inbox: Inbox, outbox: Outbox) -> None:
        try:
            while True:
                await outbox.put(len(ended))
        finally:
            ended.append("endless")

    async def works(inbox: Inbox, outbox: Outbox) -> None:
        try:
            async for item in inbox:
                await outbox.put(item)
                await settle(2)
        finally:
            ended.append("works")

    async def takes_two(inbox: Inbox, outbox: Outbox) -> None:
        async for item in inbox:
            await outbox.put(item)
            if inbox.items == 2:
                inbox.finish()

    pipeline = Pipeline(
        [
            Stage(name="endless", run=endless),
            Stage(name="works", run=works, workers=3),
            Stage(name="enough", run=takes_two),
            Stage(name="after", run=sink(items)),
        ]
    )
    async with asyncio.timeout(5):
        await pipeline.run()
    assert sorted(ended) == ["endless", "works", "works", "works"]
    assert len(items) == 2


async def test_the_other_workers_of_a_stage_that_has_enough_finish_what_they_hold():
    items, gate = [], Gate()

    async def works(inbox: Inbox, outbox: Outbox) -> None:
        async for n in inbox:
            if n:
                inbox.finish()
            else:
                await gate.passed()
            await outbox.put(n)

    stages = [Stage(name="a", run=source(50)), Stage(name="b", run=works, workers=2), Stage(name="c", run=sink(items))]
    async with asyncio.TaskGroup() as group:
        running = group.create_task(Pipeline(stages).run())
        await gate.started.wait()
        await settle()
        assert not running.done()
        gate.release()
    assert sorted(items) == [0, 1]


async def test_no_stage_is_busy_for_less_than_nothing():
    """Each look at the clock is a little later than the one before; a stage may wait on both of its ports at once."""
    clock = Clock(tick=0.001)

    async def waits_twice(inbox: Inbox, outbox: Outbox) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(inbox.get())
            for n in range(3):
                group.create_task(outbox.put(n))

    async def never(inbox: Inbox, outbox: Outbox) -> None:
        await asyncio.Event().wait()

    def busy(pipeline: Pipeline) -> list[float]:
        return [row.busy_s for row in pipeline.stats()]

    last = Stage(name="c", run=never, capacity=1)
    for second in (forward, waits_twice):
        pipeline = Pipeline([Stage(name="a", run=never), Stage(name="b", run=second, workers=3), last], clock)
        running = asyncio.ensure_future(pipeline.run())
        await settle()
        assert min(busy(pipeline)) >= 0
        clock.now += 5.0
        assert min(busy(pipeline)) >= 0
        running.cancel()
        await asyncio.wait([running])
