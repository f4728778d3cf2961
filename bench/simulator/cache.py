"""KV blocks of a simulated engine: in use, in the prefix cache, or unused.

Freed blocks stay in the cache; the least recently freed are evicted first, of one trajectory its tail first, so that
what is cached of it is always a prefix. A group's prompt is shared: it is in use as long as one of its requests runs,
and cached afterwards. Blocks that were never full are reused first.

Invariant (`check`): blocks in use, cached and unused add up to all of them.
"""

from __future__ import annotations

from collections import OrderedDict


class KvCache:
    """Counts blocks without numbering them. shared: full blocks of the prompt that all members of a group share."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.free = blocks  # as vLLM counts: unused ones and all that is cached
        self._cached: OrderedDict[int, int] = OrderedDict()  # own blocks by key; of group g's prompt by -1 - g
        self._cached_blocks = 0
        self._users: dict[int, int] = {}  # running requests of a group

    def in_use(self, group: int) -> bool:
        return group in self._users

    def cached_of(self, key: int, group: int, shared: int) -> int:
        """Returns the blocks of the trajectory that are there, those of its group's prompt included."""
        prompt = shared if group in self._users else self._cached.get(-1 - group, 0)
        return prompt + self._cached.get(key, 0)

    def hold(self, key: int, group: int, shared: int, blocks: int) -> None:
        """Takes `blocks` in all for a trajectory that runs now, the cached ones among them."""
        own = self._cached.pop(key, 0)
        prompt = self._cached.pop(-1 - group, 0)
        self._cached_blocks -= own + prompt
        there = self._users.get(group, 0)
        assert there or prompt == shared or not own, "the prompt is freed after what follows it, and evicted after it"
        self._users[group] = there + 1
        self.free -= own + prompt
        self.take(blocks - own - (shared if there else prompt))

    def take(self, blocks: int) -> None:
        """Takes unused blocks, then those of the cache that were freed longest ago."""
        assert 0 <= blocks <= self.free, (blocks, self.free)
        self.free -= blocks
        while self._cached_blocks > self.free:
            entry, count = next(iter(self._cached.items()))
            evicted = min(count, self._cached_blocks - self.free)
            if evicted == count:
                del self._cached[entry]
            else:
                self._cached[entry] = count - evicted
            self._cached_blocks -= evicted

    def release(self, key: int, group: int, shared: int, blocks: int, full: int) -> None:
        """Frees the blocks of a trajectory that no longer runs; `full` of them are computed to their end and cached."""
        own = max(0, full - shared)
        self.free += blocks - shared
        if own:
            self._cached[key] = own
            self._cached_blocks += own
        self._users[group] -= 1
        if not self._users[group]:
            del self._users[group]
            self.free += shared
            if shared:
                self._cached[-1 - group] = shared
                self._cached_blocks += shared

    def check(self, running: list[tuple[int, int, int, int]]) -> None:
        """Raises AssertionError unless it fits to the running requests: (key, group, shared, blocks)."""
        groups = {group: shared for _, group, shared, _ in running}
        used = sum(blocks - shared for _, _, shared, blocks in running) + sum(groups.values())
        assert used + self.free == self.blocks, (used, self.free, self.blocks)
        assert self._users.keys() == groups.keys()
        assert sum(self._users.values()) == len(running)
        assert 0 <= sum(self._cached.values()) == self._cached_blocks <= self.free
        assert all(count > 0 for count in self._cached.values())
        assert not self._cached.keys() & {key for key, _, _, _ in running}
        assert not self._cached.keys() & {-1 - group for group in groups}
