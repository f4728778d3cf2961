"""Nothing hangs silently: what tasks wait for can be seen, and a run that stands still ends."""

import asyncio
import time

import pytest

from engine.pipeline.pipeline import Pipeline, Stage
from engine.telemetry.watchdog import NoProgress, report, watch


async def swallow(inbox, outbox):
    async for _ in inbox:
        pass


async def wait_for_ever(inbox, outbox):
    await outbox.put(1)
    await asyncio.get_running_loop().create_future()


def stuck_pipeline():
    return Pipeline([Stage(name="source", run=wait_for_ever), Stage(name="sink", run=swallow, workers=3)])


async def stand_still(pipeline):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pipeline.run())
        tasks.create_task(watch(lambda: 7, pipeline.stats, silence_s=0.05))


async def test_a_run_that_stands_still_ends_with_a_report():
    with pytest.raises(ExceptionGroup) as failure:
        await stand_still(stuck_pipeline())
    [stuck] = failure.value.exceptions
    assert isinstance(stuck, NoProgress)
    assert "stage sink: 0 queued, 1 in, 0 out" in str(stuck)
    assert "wait_for_ever (source[0])" in str(stuck)
    assert "3 x test_watchdog.py" in str(stuck)


async def test_a_run_that_moves_goes_on():
    numbers = iter(range(1_000_000))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await watch(lambda: next(numbers), list, silence_s=0.01)


async def test_a_process_that_stood_still_is_not_stuck():
    """As between Ctrl-Z and fg: the clock goes on, and nothing can move."""
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch(lambda: 7, list, silence_s=0.2))
        await asyncio.sleep(0)  # it has begun
        time.sleep(0.5)  # noqa: ASYNC251
        await asyncio.sleep(0.03)  # it looks
        watching.cancel()


async def test_the_report_names_finished_and_waiting_tasks():
    lines = report(list)
    assert "test_watchdog.py" in lines
