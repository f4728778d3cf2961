"""Leases: the bound on staleness holds for every schedule."""

import asyncio
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pipeline.leases import Leases
from tests.support.fakes import settle


@given(
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    choices=st.lists(st.integers(0, 10), max_size=80),
)
def test_a_group_is_never_admitted_before_the_weights_of_its_step_minus_s(groups_per_step, max_staleness, choices):
    """Takes and releases in any order; a step's weights are live when all leases up to it have come back."""
    leases = Leases(groups_per_step, max_staleness)
    out, back = [], set()
    for choice in choices:
        if choice % 2 or not out:
            lease = leases.take()
            version = next(n for n in range(10**6) if n not in back) // groups_per_step
            if lease is None:
                assert leases.step_of(len(out) + len(back)) > version + max_staleness, "refused without need"
            else:
                assert lease == len(out) + len(back), "in order"
                assert leases.step_of(lease) - version <= max_staleness
                out.append(lease)
        else:
            lease = out.pop(choice % len(out))
            leases.release(lease)
            back.add(lease)
        assert len(out) <= leases.capacity == (max_staleness + 1) * groups_per_step


def test_strictly_on_policy_waits_for_the_last_group_of_a_step():
    leases = Leases(3, 0)
    assert [leases.take() for _ in range(4)] == [0, 1, 2, None]
    leases.release(0)
    leases.release(2)
    assert leases.take() is None
    leases.release(1)
    assert leases.take() == 3


@pytest.mark.parametrize("lease", [0, 2, 99, -1])
def test_a_lease_that_is_not_out_cannot_be_released(lease):
    leases = Leases(2, 0)
    leases.take(), leases.take()
    leases.release(0)
    with pytest.raises(ValueError, match=f"lease {lease} is not out"):
        leases.release(lease)
    leases.release(1)
    assert leases.take() == 2


def test_the_second_release_is_refused_while_an_earlier_lease_is_out():
    leases = Leases(2, 0)
    leases.take(), leases.take()
    leases.release(1)
    with pytest.raises(ValueError, match="lease 1 is not out"):
        leases.release(1)


async def test_acquire_waits_and_is_woken_in_order_also_when_a_waiter_is_cancelled():
    leases, got = Leases(1, 1), deque()

    async def worker(name):
        got.append((name, await leases.acquire()))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(worker(name)) for name in "abcd"]
        await settle()
        assert list(got) == [("a", 0), ("b", 1)]
        tasks[2].cancel()
        leases.release(0)
        await settle()
        assert list(got)[2:] == [("d", 2)]
    assert leases.take() is None, "1 and 2 are out"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 0), "groups_per_step must be at least 1, got 0"), ((1, -1), "max_staleness must be at least 0, got -1")],
)
def test_impossible_bounds_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Leases(*arguments)
