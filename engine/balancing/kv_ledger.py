"""Who is where and what is reserved for whom: the state of `engine.balancing.kv_aware.KvAware`, and its invariants
(`check`).

Legend: N trajectories, R replicas, H horizons of the forecast (see engine.balancing.length_forecast). A reservation is
the expected number of tokens at each horizon and then their variances, all integers, so that what is released is
exactly what was taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.balancing.length_forecast import HORIZONS, Growth, Ints, Kin, Reals
from engine.ports import KvSample

H = len(HORIZONS)
WAITING = ("ready", "parked", "fresh")
SHOWN_AFTER = 2  # samples until a request that was sent to an engine is in its numbers
KNOWN = 4096  # reservations that are remembered: where all fit, growth is never learnt and its version stays


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
    """reserved_H: the sum over its active set, each group's prompt counted once; a row of `Books.reserved_RH`."""

    index: int
    blocks: int
    block_size: int
    reserved_H: Ints
    active: dict[int, Item] = field(default_factory=dict)
    steps: int = 0
    forecast_at: int = 0  # steps when the reservations were last predicted
    draining: bool = False


class Books:
    """Trajectories, groups, queues and replicas. Every change keeps the invariants."""

    def __init__(self, growth: Growth) -> None:
        self.growth = growth
        self.items: dict[int, Item] = {}
        self.kins: dict[int, Kin] = {}
        self.groups: dict[int, int] = {}  # by trajectory
        self.replicas: dict[int, Replica] = {}
        self.reserved_RH: Ints = np.zeros((0, 2 * H), np.int64)
        self.open_tokens_R: Reals = np.zeros(0)  # size of those that take trajectories, 0 of others
        self.block_size_R: Reals = np.ones(0)
        self.free_blocks_R: Reals = np.zeros(0)  # of the last sample, less a block for each that runs
        self.sent_blocks_R2: Reals = np.zeros((0, SHOWN_AFTER))  # not yet in a sample, newest last
        self.queues: dict[str, OrderedDict[int, Item]] = {name: OrderedDict() for name in WAITING}
        self.idle: OrderedDict[int, Item] = OrderedDict()  # tool-waiting ones with a home, the longest first
        self._known: dict[tuple[int, ...], Ints] = {}  # reservations by group, size, its number of ends, block size
        self._version = -1

    def add_replica(self, index: int, blocks: int, block_size: int) -> None:
        if index >= len(self.reserved_RH):
            self._extend(index + 1 - len(self.reserved_RH))
        self.reserved_RH[index] = 0
        self.open_tokens_R[index] = blocks * block_size
        self.block_size_R[index] = block_size
        self.free_blocks_R[index] = blocks
        self.sent_blocks_R2[index] = 0
        self.replicas[index] = Replica(index, blocks, block_size, self.reserved_RH[index])

    def drain(self, replica: Replica) -> None:
        replica.draining = True
        self.open_tokens_R[replica.index] = 0

    def sample(self, replica: Replica, sample: KvSample) -> None:
        replica.steps += sample.steps
        self.free_blocks_R[replica.index] = sample.free_blocks - sample.running
        self.sent_blocks_R2[replica.index, :-1] = self.sent_blocks_R2[replica.index, 1:]
        self.sent_blocks_R2[replica.index, -1] = 0

    def add(self, key: int, group: int, prompt_tokens: int, tokens: int) -> Item:
        kin = self.kins.get(group)
        if kin is None:
            kin = self.kins[group] = Kin(prompt_tokens)
        kin.members += 1
        self.groups[key] = group
        item = self.items[key] = Item(key, kin, tokens, "fresh")
        return item

    def remove(self, item: Item) -> None:
        self.dequeue(item)
        self.release(item)
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
        """It runs there from now on, with a reservation for what it will grow to; at home with the one it has."""
        item.tokens = self.length(item)
        if item.home != replica.index:
            there = item.kin.prompt_tokens if replica.index in item.kin.replicas else 0
            self.sent_blocks_R2[replica.index, -1] += (item.tokens - there) / replica.block_size + 1
            self.release(item)
            item.home = replica.index
            replica.active[item.key] = item
            item.kin.replicas[replica.index] = item.kin.replicas.get(replica.index, 0) + 1
            if item.kin.replicas[replica.index] == 1:
                replica.reserved_H[:H] += item.kin.prompt_tokens
            item.reserved_H = self.reservation(item, replica.block_size)
            replica.reserved_H += item.reserved_H
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
            replica.reserved_H[:H] -= item.kin.prompt_tokens
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
        self.open_tokens_R[index] = 0
        return self.replicas.pop(index)

    def length(self, item: Item) -> int:
        """Tokens now: a running one has grown by one in each step of its replica."""
        if item.state != "running" or item.home is None:
            return item.tokens
        return item.tokens + self.replicas[item.home].steps - item.steps

    def reservation(self, item: Item, block_size: int) -> Ints:
        """Tokens (H) that it is expected to hold beyond its group's prompt, half a block lost at its end included."""
        if self._version != self.growth.version or len(self._known) == KNOWN:
            self._known.clear()
            self._version = self.growth.version
        size = max(0, self.length(item) - item.kin.prompt_tokens)
        name = self.groups[item.key], size, len(item.kin.ended), block_size
        found = self._known.get(name)
        if found is None:
            found = self.growth.predict(np.array([size]), [item.kin])[0]
            found[:H] += block_size // 2
            self._known[name] = found
        return found

    def headroom_tokens(self, item: Item, fill: float, spread: float) -> Reals:
        """Tokens (R) that `fill` of a replica leaves at the fullest horizon with the trajectory there and `spread`
        standard deviations of the predicted use.

        -inf where it does not fit: where that is negative, or the live free blocks do not hold what must be computed at
        once (its context, less the group's prompt where that is) and a block for each that runs.
        """
        length, kin = self.length(item), item.kin
        row_H = self.reservation(item, int(self.block_size_R[0]))
        total_RH = self.reserved_RH + row_H
        peak_R = np.maximum.reduce(total_RH[:, :H] + spread * np.sqrt(total_RH[:, H:]), axis=1)
        headroom_R = fill * self.open_tokens_R - peak_R - kin.prompt_tokens
        live_R = self.free_blocks_R - np.add.reduce(self.sent_blocks_R2, axis=1) - length / self.block_size_R - 1
        for index in kin.replicas:
            headroom_R[index] += kin.prompt_tokens
            live_R[index] += kin.prompt_tokens / self.block_size_R[index]
        headroom_R[(np.minimum(headroom_R, live_R) < 0) | (self.open_tokens_R == 0)] = -np.inf
        return headroom_R

    def forecast(self, replica: Replica) -> None:
        """Predicts all reservations of a replica anew."""
        items = list(replica.active.values())
        replica.forecast_at = replica.steps
        if not items:
            assert not replica.reserved_H.any()
            return
        rows_NH = self.growth.predict(self.sizes(items), [item.kin for item in items])
        rows_NH[:, :H] += replica.block_size // 2
        replica.reserved_H[:] = rows_NH.sum(axis=0)
        for item, row_H in zip(items, rows_NH, strict=True):
            item.reserved_H = row_H
        replica.reserved_H[:H] += sum(kin.prompt_tokens for kin in {id(item.kin): item.kin for item in items}.values())

    def sizes(self, items: Sequence[Item]) -> Ints:
        steps: dict[int | None, int] = {index: replica.steps for index, replica in self.replicas.items()}
        sizes = [
            item.tokens - item.kin.prompt_tokens + (steps[item.home] - item.steps if item.state == "running" else 0)
            for item in items
        ]
        return np.maximum(np.array(sizes, np.int64), 0)

    def waiting(self) -> int:
        return sum(map(len, self.queues.values()))

    def check(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        for name, queue in self.queues.items():
            assert all(item.state == name and self.items[key] is item for key, item in queue.items()), name
        for index, replica in self.replicas.items():
            total_H: Reals | Ints = np.zeros(2 * H, np.int64)
            for item in replica.active.values():
                assert item.home == index, item
                assert item.state in ("running", "tool", "ready"), item
                assert item.reserved_H is not None
                total_H = total_H + item.reserved_H
            kins = {id(item.kin): item.kin for item in replica.active.values()}.values()
            total_H[:H] += sum(kin.prompt_tokens for kin in kins)
            assert replica.reserved_H.base is self.reserved_RH
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

    def _extend(self, count: int) -> None:
        self.reserved_RH = np.concatenate((self.reserved_RH, np.zeros((count, 2 * H), np.int64)))
        self.open_tokens_R = np.concatenate((self.open_tokens_R, np.zeros(count)))
        self.block_size_R = np.concatenate((self.block_size_R, np.ones(count)))
        self.free_blocks_R = np.concatenate((self.free_blocks_R, np.zeros(count)))
        self.sent_blocks_R2 = np.concatenate((self.sent_blocks_R2, np.zeros((count, SHOWN_AFTER))))
        for replica in self.replicas.values():
            replica.reserved_H = self.reserved_RH[replica.index]
