"""Placement by KV cache: late binding, admission by predicted use, places of tool-waiting trajectories held.

Invariants (`check` states them)
- A trajectory is in exactly one of: waiting (fresh, ready or parked), running on a replica, tool-waiting, gone.
- It is in the active set of at most one replica; what is reserved there when it enters is released when it leaves,
  so that the sum of reservations after a run is exactly zero.
- Order: ready (its KV is still on a replica) before parked (its KV was given up) before fresh; each first come first
  served. No live replica with an empty active set leaves a waiting trajectory waiting.

vLLM's free blocks count evictable prefixes as free: they are a hard check only. What tool-waiting trajectories hold is
counted here.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass, field

from engine.balance import Place
from engine.ports import KvSample


@dataclass(slots=True)
class _Item:
    key: int
    group: int
    tokens: int
    state: str  # "fresh" | "ready" | "parked" | "running" | "tool"
    home: int | None = None  # the replica in whose active set it is
    reserved: int = 0  # blocks
    since: float = 0.0


@dataclass(slots=True)
class _Replica:
    blocks: int
    block_size: int
    active: dict[int, _Item] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)  # members of the active set by group
    reserved: int = 0
    free: int = 0  # last live sample
    running: int = 0
    unseen: float = 0.0  # blocks of placements since that sample
    draining: bool = False


class KvAware:
    """Late binding and admission by predicted KV use.

    A replica admits a trajectory when the expected final sizes of its active set, tool-waiting ones included, fit in
    `fill` of its blocks and vLLM's live free blocks hold what must be computed now. The expected final size of a
    trajectory of length L is the mean of the finished ones longer than L (the bound `max_tokens` until some have
    finished). A trajectory that waits for tools longer than `hold_s` (what recomputing a full cache costs) gives its
    blocks up and queues as parked. Rules 1-9 and 14 of the policy study in the design notes.
    """

    def __init__(self, max_tokens: int, fill: float = 0.85, hold_s: float = 25.0, history: int = 1024) -> None:
        if not 0 < fill <= 1:
            raise ValueError(f"fill must be in (0, 1], got {fill}")
        self.max_tokens = max_tokens
        self.fill = fill
        self.hold_s = hold_s
        self._items: dict[int, _Item] = {}
        self._replicas: dict[int, _Replica] = {}
        self._queues: dict[str, deque[_Item]] = {"ready": deque(), "parked": deque(), "fresh": deque()}
        self._sizes: deque[int] = deque(maxlen=history)
        self._sorted: list[int] = []

    def replica_up(self, replica: int, blocks: int, block_size: int) -> None:
        if replica in self._replicas:
            raise ValueError(f"replica {replica} is up already")
        self._replicas[replica] = _Replica(blocks, block_size, free=blocks)

    def replica_down(self, replica: int) -> None:
        gone = self._replicas.pop(replica)
        for item in gone.active.values():
            item.home, item.reserved = None, 0
            if item.state == "running":
                item.state = "tool"
            elif item.state == "ready":
                self._queues["ready"].remove(item)
                self._enqueue(item, "parked")

    def replica_drain(self, replica: int) -> None:
        self._replicas[replica].draining = True

    def sample(self, replica: int, sample: KvSample, now: float) -> None:
        state = self._replicas.get(replica)
        if state is not None:
            state.free, state.running, state.unseen = sample.free_blocks, sample.running, 0.0

    def arrive(self, key: int, group: int, tokens: int, now: float) -> None:
        item = self._items.get(key)
        if item is None:
            item = self._items[key] = _Item(key, group, tokens, "fresh")
            self._enqueue(item, "fresh")
            return
        if item.state != "tool":
            raise ValueError(f"trajectory {key} arrives while {item.state}")
        item.tokens = tokens
        if item.home is not None and now - item.since > self.hold_s:
            self._release(item)
        self._enqueue(item, "ready" if item.home is not None else "parked")

    def turn_done(self, key: int, tokens: int, now: float) -> None:
        item = self._items[key]
        if item.state not in ("running", "tool"):  # "tool": its replica went down as the turn ended
            raise ValueError(f"trajectory {key} ends a turn while {item.state}")
        item.tokens, item.state, item.since = tokens, "tool", now

    def leave(self, key: int, tokens: int, finished: bool) -> None:
        item = self._items.pop(key, None)
        if item is None:
            return
        if item.state in self._queues:
            self._queues[item.state].remove(item)
        elif finished:
            self._learn(tokens)
        self._release(item)

    def decide(self, now: float) -> list[Place]:
        placed: list[Place] = []
        if not self._replicas:
            return placed
        ready = self._queues["ready"]
        while ready:
            item = ready.popleft()
            assert item.home is not None
            placed.append(self._go(item, item.home, "home"))
        if self._queues["parked"] or self._queues["fresh"]:
            self._expire(now)
        for name in ("parked", "fresh"):
            queue = self._queues[name]
            while queue:
                choice = self._choose(queue[0])
                if choice is None:
                    return placed  # the first in line waits, and nobody overtakes it
                item = queue.popleft()
                placed.append(self._go(item, *choice))
        return placed

    def expected_tokens(self, tokens: int) -> float:
        """Expected final length of a trajectory that is `tokens` long now."""
        longer = self._sorted[bisect.bisect_right(self._sorted, tokens) :]
        if not longer or len(self._sorted) < 8:
            return max(self.max_tokens, tokens)
        return sum(longer) / len(longer)

    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def reserved_blocks(self) -> int:
        return sum(replica.reserved for replica in self._replicas.values())

    def check(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        for name, queue in self._queues.items():
            assert all(item.state == name and self._items[item.key] is item for item in queue), name
            assert len({item.key for item in queue}) == len(queue)
        for index, replica in self._replicas.items():
            for item in replica.active.values():
                assert item.home == index, item
                assert item.state in ("running", "tool", "ready"), item
            total = sum(item.reserved for item in replica.active.values())
            assert total == replica.reserved, (total, replica.reserved)
            assert sum(replica.groups.values()) == len(replica.active)
        for item in self._items.values():
            assert item.home is None or self._replicas[item.home].active.get(item.key) is item, item
            assert item.state != "running" or item.home is not None, item

    def _enqueue(self, item: _Item, state: str) -> None:
        item.state = state
        self._queues[state].append(item)

    def _expire(self, now: float) -> None:
        """Tool-waiting trajectories beyond hold_s count no longer."""
        for replica in self._replicas.values():
            for item in list(replica.active.values()):
                if item.state == "tool" and now - item.since > self.hold_s:
                    self._release(item)

    def _choose(self, item: _Item) -> tuple[int, str] | None:
        """The feasible replica with most headroom, a resident group prompt counting as its blocks."""
        expected_tokens = self.expected_tokens(item.tokens)
        feasible: dict[int, float] = {}
        for index, replica in self._replicas.items():
            if replica.draining:
                continue
            if not replica.active:
                return index, "empty"
            blocks = item.tokens / replica.block_size
            headroom = self.fill * replica.blocks - replica.reserved - expected_tokens / replica.block_size
            live = replica.free - replica.unseen - replica.running - (blocks + 1)
            if headroom >= 0 and live >= 0:
                feasible[index] = headroom + (blocks if item.group in replica.groups else 0.0)
        return (max(feasible, key=feasible.__getitem__), "headroom") if feasible else None

    def _go(self, item: _Item, index: int, rule: str) -> Place:
        replica = self._replicas[index]
        if item.home is None:
            item.home = index
            replica.active[item.key] = item
            replica.groups[item.group] = replica.groups.get(item.group, 0) + 1
            replica.unseen += item.tokens / replica.block_size + 1
        before, item.reserved = item.reserved, math.ceil(self.expected_tokens(item.tokens) / replica.block_size)
        replica.reserved += item.reserved - before
        item.state = "running"
        return Place(item.key, index, rule, self.fill * replica.blocks - replica.reserved)

    def _release(self, item: _Item) -> None:
        if item.home is None:
            return
        replica = self._replicas[item.home]
        del replica.active[item.key]
        replica.groups[item.group] -= 1
        if not replica.groups[item.group]:
            del replica.groups[item.group]
        replica.reserved -= item.reserved
        item.home, item.reserved = None, 0

    def _learn(self, tokens: int) -> None:
        if len(self._sizes) == self._sizes.maxlen:
            del self._sorted[bisect.bisect_left(self._sorted, self._sizes[0])]
        self._sizes.append(tokens)
        bisect.insort(self._sorted, tokens)
