"""Who is where and what is reserved for whom: the state of `engine.kv_aware.KvAware`, and its invariants (`check`).

Legend: N trajectories, R replicas, H horizons of the forecast (see engine.growth). Reservations are tokens as integers,
one number per horizon, so that what is released is exactly what was taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from engine.growth import HORIZONS, Growth, Ints, Kin, Reals

WAITING = ("ready", "parked", "fresh")
SHOWN_AFTER = 2  # samples until a request that was sent to an engine is in its numbers


@dataclass(slots=True)
class Item:
    """A trajectory. home: the replica in whose active set it is."""

    key: int
    kin: Kin
    tokens: int  # length when it was last reported
    state: str  # "fresh" | "ready" | "parked" | "running" | "tool"
    home: int | None = None
    since: float = 0.0  # when its tools were called
    steps: int = 0  # of its replica when its turn began
    moves: int = 0
    reserved_H: Ints | None = None


@dataclass(slots=True)
class Replica:
    index: int
    blocks: int
    block_size: int
    active: dict[int, Item] = field(default_factory=dict)
    reserved_H: Ints = field(default_factory=lambda: np.zeros(len(HORIZONS), np.int64))
    steps: int = 0
    forecast_at: int = 0  # steps when the reservations were last predicted
    sent_blocks: list[float] = field(default_factory=lambda: [0.0] * SHOWN_AFTER)  # not yet in a sample, newest last
    free_blocks: int = 0  # of the last sample
    running: int = 0
    draining: bool = False


class Books:
    """Trajectories, groups, queues and replicas. Every change keeps the invariants."""

    def __init__(self, growth: Growth) -> None:
        self.growth = growth
        self.items: dict[int, Item] = {}
        self.kins: dict[int, Kin] = {}
        self.groups: dict[int, int] = {}  # by trajectory
        self.replicas: dict[int, Replica] = {}
        self.queues: dict[str, OrderedDict[int, Item]] = {name: OrderedDict() for name in WAITING}
        self.idle: OrderedDict[int, Item] = OrderedDict()  # tool-waiting ones with a home, the longest first
        self._known: dict[tuple[int, ...], Ints] = {}  # reservations by group, size, its number of ends, block size
        self._version = -1

    def add(self, key: int, group: int, tokens: int) -> Item:
        kin = self.kins.get(group)
        if kin is None:
            kin = self.kins[group] = Kin(tokens)
        kin.members += 1
        self.groups[key] = group
        item = self.items[key] = Item(key, kin, tokens, "fresh")
        return item

    def remove(self, item: Item) -> None:
        self.dequeue(item)
        self.release(item)
        self.idle.pop(item.key, None)
        del self.items[item.key]
        item.kin.members -= 1
        group = self.groups.pop(item.key)
        if not item.kin.members:
            del self.kins[group]

    def enqueue(self, item: Item, state: str) -> None:
        self.idle.pop(item.key, None)
        item.state = state
        self.queues[state][item.key] = item

    def dequeue(self, item: Item) -> None:
        if item.state in self.queues:
            self.queues[item.state].pop(item.key, None)

    def enter(self, item: Item, replica: Replica) -> None:
        """It runs there from now on, with a reservation for what it will grow to."""
        item.tokens = self.length(item)
        if item.home == replica.index:
            self._reserve(item, replica, self.reservation(item, replica.block_size))
        else:
            need = self.need_blocks(item, replica)
            self.release(item)
            item.home = replica.index
            replica.active[item.key] = item
            item.kin.replicas[replica.index] = item.kin.replicas.get(replica.index, 0) + 1
            if item.kin.replicas[replica.index] == 1:
                replica.reserved_H += item.kin.prompt_tokens
            self._reserve(item, replica, self.reservation(item, replica.block_size))
            replica.sent_blocks[-1] += need
        item.state, item.steps = "running", replica.steps

    def release(self, item: Item) -> None:
        """It leaves the active set, and its reservation with it."""
        if item.home is None:
            return
        replica = self.replicas[item.home]
        del replica.active[item.key]
        assert item.reserved_H is not None
        replica.reserved_H -= item.reserved_H
        item.kin.replicas[item.home] -= 1
        if not item.kin.replicas[item.home]:
            del item.kin.replicas[item.home]
            replica.reserved_H -= item.kin.prompt_tokens
        item.home, item.reserved_H = None, None
        self.idle.pop(item.key, None)

    def drop_replica(self, index: int) -> Replica:
        """Nobody is there any more; who waited for it is parked."""
        replica = self.replicas[index]
        for item in list(replica.active.values()):
            self.release(item)
            if item.state == "running":
                item.state = "tool"
            elif item.state == "ready":
                self.dequeue(item)
                self.enqueue(item, "parked")
        return self.replicas.pop(index)

    def length(self, item: Item) -> int:
        """Tokens now: a running one has grown by one in each step of its replica."""
        if item.state != "running" or item.home is None:
            return item.tokens
        return item.tokens + self.replicas[item.home].steps - item.steps

    def reservation(self, item: Item, block_size: int) -> Ints:
        """Tokens (H) that it is expected to hold beyond its group's prompt, half a block lost at its end included."""
        if self._version != self.growth.version:
            self._known.clear()
            self._version = self.growth.version
        size = max(0, self.length(item) - item.kin.prompt_tokens)
        name = id(item.kin), size, len(item.kin.ended), block_size
        found = self._known.get(name)
        if found is None:
            found = self.growth.predict(np.array([size]), [item.kin])[0] + block_size // 2
            self._known[name] = found
        return found

    def need_blocks(self, item: Item, replica: Replica) -> float:
        """Blocks that must be found there at once: its context, less the group's prompt where that is, and one more."""
        there = item.kin.prompt_tokens if replica.index in item.kin.replicas else 0
        return (self.length(item) - there) / replica.block_size + 1

    def forecast(self, replica: Replica) -> None:
        """Predicts all reservations of a replica anew."""
        items = list(replica.active.values())
        replica.forecast_at = replica.steps
        if not items:
            return
        rows_NH = self.growth.predict(self.sizes(items), [item.kin for item in items])
        rows_NH += replica.block_size // 2
        replica.reserved_H = rows_NH.sum(axis=0)
        for item, row_H in zip(items, rows_NH, strict=True):
            item.reserved_H = row_H
        replica.reserved_H += sum(kin.prompt_tokens for kin in {id(item.kin): item.kin for item in items}.values())

    def sizes(self, items: Iterable[Item]) -> Ints:
        return np.array([max(0, self.length(item) - item.kin.prompt_tokens) for item in items], np.int64)

    def waiting(self) -> int:
        return sum(map(len, self.queues.values()))

    def check(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        for name, queue in self.queues.items():
            assert all(item.state == name and self.items[key] is item for key, item in queue.items()), name
        for index, replica in self.replicas.items():
            total_H: Reals | Ints = np.zeros(len(HORIZONS), np.int64)
            for item in replica.active.values():
                assert item.home == index, item
                assert item.state in ("running", "tool", "ready"), item
                assert item.reserved_H is not None
                total_H = total_H + item.reserved_H
            kins = {id(item.kin): item.kin for item in replica.active.values()}.values()
            total_H = total_H + sum(kin.prompt_tokens for kin in kins)
            assert np.array_equal(total_H, replica.reserved_H), (index, total_H, replica.reserved_H)
            assert not (replica.draining and any(item.state != "running" for item in replica.active.values()))
        for item in self.items.values():
            assert item.home is None or self.replicas[item.home].active.get(item.key) is item, item
            assert (item.home is None) == (item.reserved_H is None), item
            assert item.state != "running" or item.home is not None, item
            assert item.state != "ready" or item.home is not None, item
            assert item.state not in ("parked", "fresh") or item.home is None, item
            assert item.state in (*self.queues, "running", "tool"), item
            assert item.state not in self.queues or self.queues[item.state].get(item.key) is item, item
            assert (item.key in self.idle) == (item.state == "tool" and item.home is not None), item
        for kin in self.kins.values():
            members = [item for item in self.items.values() if item.kin is kin]
            assert len(members) == kin.members > 0, kin
            homes = [item.home for item in members if item.home is not None]
            assert kin.replicas == {home: homes.count(home) for home in homes}, kin

    def _reserve(self, item: Item, replica: Replica, row_H: Ints) -> None:
        if item.reserved_H is not None:
            replica.reserved_H -= item.reserved_H
        item.reserved_H = row_H
        replica.reserved_H += row_H
