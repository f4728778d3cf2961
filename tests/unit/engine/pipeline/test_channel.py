"""Channels: bounded, closable, nothing lost."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pipeline.channel import Channel, ChannelClosed
from tests.support.examples import examples
from tests.support.fakes import settle


async def test_a_full_channel_blocks_the_producer_and_keeps_the_order():
    channel = Channel(2)
    async with asyncio.TaskGroup() as group:
        for n in range(5):
            group.create_task(channel.put(n))
        await settle()
        assert len(channel) == 2
        assert [await channel.get() for _ in range(5)] == [0, 1, 2, 3, 4]


async def test_what_waits_is_delivered_after_close_then_everybody_ends():
    channel = Channel(4)
    for n in range(3):
        await channel.put(n)
    channel.close()
    with pytest.raises(ChannelClosed):
        await channel.put(3)
    assert [n async for n in channel] == [0, 1, 2]
    with pytest.raises(ChannelClosed):
        await channel.get()


async def test_close_wakes_every_consumer_and_every_producer():
    empty, full = Channel(1), Channel(1)
    await full.put(0)
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(_closed(empty.get)) for _ in range(3)]
        waiting += [group.create_task(_closed(full.put, n)) for n in range(3)]
        await settle()
        empty.close()
        full.close()
    assert all(task.result() for task in waiting)


@pytest.mark.parametrize("first", ["cancel", "put"])
async def test_a_consumer_cancelled_in_the_tick_of_a_put_takes_nothing_with_it(first):
    channel = Channel(1)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(channel.get()) for _ in range(2)]
        await settle()
        if first == "cancel":
            tasks[0].cancel()
            await channel.put("item")
        else:
            await channel.put("item")
            tasks[0].cancel()
        assert await tasks[1] == "item"
    assert tasks[0].cancelled()


async def test_a_producer_cancelled_in_the_tick_of_a_get_leaves_its_place_to_the_next():
    channel = Channel(1)
    await channel.put(0)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(channel.put(n)) for n in (1, 2)]
        await settle()
        assert await channel.get() == 0
        tasks[0].cancel()
        await tasks[1]
    assert await channel.get() == 2


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_channel_without_room_is_refused(capacity):
    with pytest.raises(ValueError, match=rf"channel c: capacity must be at least 1, got {capacity}"):
        Channel(capacity, "c")


async def _closed(operation, *args):
    with pytest.raises(ChannelClosed):
        await operation(*args)
    return True


actions = st.lists(
    st.one_of(st.just("put"), st.just("get"), st.just("tick"), st.tuples(st.just("cancel"), st.integers(0, 20))),
    max_size=40,
)


@examples(150)
@given(actions=actions, capacity=st.integers(1, 3))
def test_any_interleaving_delivers_each_item_that_was_put_once_and_in_order(actions, capacity):
    asyncio.run(_interleave(actions, capacity))


async def _interleave(actions, capacity):
    channel = Channel(capacity)
    put, got, tasks = [], [], []

    async def producer(number):
        await channel.put(number)
        put.append(number)

    async def consumer():
        got.append(await channel.get())

    async with asyncio.TaskGroup() as group:
        for number, action in enumerate(actions):
            if action == "tick":
                await asyncio.sleep(0)
            elif action == "put":
                tasks.append(group.create_task(producer(number)))
            elif action == "get":
                tasks.append(group.create_task(consumer()))
            elif tasks:
                tasks[action[1] % len(tasks)].cancel()
            assert len(channel) <= capacity
        await settle(len(tasks) + 3)
        blocked = [task for task in tasks if not task.done()]
        assert not blocked or len(channel) in (0, capacity), "somebody waits although there are items and room"
        for task in blocked:
            task.cancel()
        await settle(3)
    channel.close()
    got += [item async for item in channel]
    assert got == put
