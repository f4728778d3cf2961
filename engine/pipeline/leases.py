"""Leases: the bound on staleness, as an object.

Invariants
- Groups are admitted in order; the i-th belongs to step i // B and its lease is number i.
- At most (S + 1) * B leases are out, and those of a step come back only when the weights trained from it are live.
  So a group of step k is admitted at weight version k - S or later, and no token older than S versions is trained.
- A lease is released exactly once.
"""

from __future__ import annotations

import asyncio

from engine.pipeline.whereabouts import Whereabouts
from sandbox.require import at_least, require


class Leases:
    """groups_per_step is B, max_staleness is S (0: strictly on-policy). The capacity is AReaL's (arXiv 2505.24298).

    >>> leases = Leases(groups_per_step=2, max_staleness=0)
    >>> leases.take(), leases.take(), leases.take()
    (0, 1, None)
    >>> leases.release(0); leases.take() is None  # the step is not over: lease 1 is still out
    True
    >>> leases.release(1); leases.take()
    2
    """

    def __init__(self, groups_per_step: int, max_staleness: int, first_step: int = 0) -> None:
        require("groups_per_step", groups_per_step, at_least(1))
        require("max_staleness", max_staleness, at_least(0))
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.first_step = first_step
        self._next = first_step * groups_per_step
        self._released: set[int] = set()
        self._floor = self._next  # all leases below are released
        self._change = asyncio.Event()
        self.waiting = False  # whether a task waits for a lease
        self.whereabouts = Whereabouts()  # tells where each group is whose lease is out

    @property
    def capacity(self) -> int:
        """The most leases that are out at once: (S + 1) * B."""
        return (self.max_staleness + 1) * self.groups_per_step

    def step_of(self, lease: int) -> int:
        return lease // self.groups_per_step

    def take(self) -> int | None:
        """Returns the next lease, or None while the bound forbids it."""
        live_step = self._floor // self.groups_per_step  # the weights of all steps below it are live
        if self.step_of(self._next) > live_step + self.max_staleness:
            return None
        self._next += 1
        return self._next - 1

    async def acquire(self) -> int:
        """Waits until `take` succeeds."""
        while (lease := self.take()) is None:
            self._change.clear()
            self.waiting = True
            try:
                await self._change.wait()
            finally:
                self.waiting = False
        return lease

    def release(self, lease: int) -> None:
        """Takes a lease back. Raises ValueError for one that is not out."""
        if not self._floor <= lease < self._next or lease in self._released:
            raise ValueError(f"lease {lease} is not out")
        self.whereabouts.forget(lease)
        self._released.add(lease)
        while self._floor in self._released:
            self._released.remove(self._floor)
            self._floor += 1
        self.waiting = False  # the task that waited tries again
        self._change.set()
