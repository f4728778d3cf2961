"""The queues of a pool: for the slots of a tier (`TierQueue`) or for one session (`SessionQueue`). Pure.

Invariants
- Calls of a queue start in the order in which they came; a call that has not started can be removed.
- A session's cell starts when all of its history has been replayed, each cell of it under its own limits and with the
  same end ("ok" or "error") as the first time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from sandbox import wire
from sandbox.host.slots import SlotHandle

STARTS = 2  # attempts to start a jail that reports an error
KILLS = 5  # attempts to start one that dies silently, as if something killed it
PAUSE_S = 10.0


class _CallQueue:
    """Calls in the order of their arrival, all for one tier."""

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self.waiting: deque[tuple[int, wire.RunRequest]] = deque()  # (number of arrival, call)

    @property
    def arrived(self) -> int:
        """The number of its oldest call."""
        return self.waiting[0][0]

    def take_out(self, ids: Collection[int]) -> list[int]:
        """Removes those of the calls that wait; returns their ids."""
        removed = [call.id for _, call in self.waiting if call.id in ids]
        self.waiting = deque(item for item in self.waiting if item[1].id not in ids)
        return removed

    def take_all(self) -> list[int]:
        """Removes every unanswered call; returns their ids."""
        return self.take_out([call.id for _, call in self.waiting])


class TierQueue(_CallQueue):
    """The stateless calls for a tier, and its slots: `idle` ones, and how many are `starting`."""

    def __init__(self, tier: str) -> None:
        super().__init__(tier)
        self.idle: list[SlotHandle] = []
        self.starting = 0


class SessionQueue(_CallQueue):
    """The cells of one session.

    number: cells kept so far.
    script: the part of its history that is yet to be replayed.
    cell: the one that runs.
    memory_bytes: what it held after its last cell.
    broken: its state is gone or cannot be rebuilt.
    """

    def __init__(self, tier: str, step: wire.SessionStep) -> None:
        super().__init__(tier)
        self.id, self.number, self.script = step.session, 0, deque(step.history or ())
        self.slot: SlotHandle | None = None
        self.cell: wire.RunRequest | None = None
        self.memory_bytes = 0
        self.broken = False

    @property
    def idle_session(self) -> bool:
        """Whether nothing runs or waits in it, but it holds something."""
        return self.slot is not None and self.slot.call is None and not self.waiting

    def next(self) -> tuple[wire.RunRequest, bool]:
        """Returns what runs next, a cell of the history or the oldest one that waits, and whether with a backup."""
        call = self.waiting[0][1]
        assert call.step is not None
        if self.script:
            old = self.script[0]
            return msgspec.structs.replace(call, code=old.code, stdin=old.stdin, limits=old.limits), False
        self.cell = self.waiting.popleft()[1]
        return call, call.step.backup

    def ended(self, result: wire.ToolResult) -> int | None:
        """Notes the end of the cell of `next`; returns its id if the result answers it, None within the history."""
        cell, self.cell = self.cell, None
        self.number += result.session_state == "kept"
        if cell is not None:
            self.broken = result.session_state == "lost"
            return cell.id
        before = "ok" if self.script.popleft().ok else "error"
        self.broken = result.session_state != "kept" or result.outcome != before
        return None

    def take_all(self) -> list[int]:
        cell, self.cell = self.cell, None
        return ([] if cell is None else [cell.id]) + super().take_all()


class Sessions:
    """All sessions of a pool, and the memory that they hold. budget_bytes: for all together."""

    def __init__(self, budget_bytes: float) -> None:
        self._budget_bytes, self.held_bytes = budget_bytes, 0
        self._queues: OrderedDict[bytes, SessionQueue] = OrderedDict()  # the least recently used first

    def get(self, session: bytes) -> SessionQueue | None:
        return self._queues.get(session)

    def add(self, queue: SessionQueue) -> SessionQueue:
        self._queues[queue.id] = queue
        return queue

    def use(self, queue: SessionQueue) -> None:
        self._queues.move_to_end(queue.id)

    def remove(self, queue: SessionQueue) -> None:
        if self._queues.get(queue.id) is queue:
            del self._queues[queue.id]
        self.held_bytes -= queue.memory_bytes
        queue.memory_bytes = 0

    def hold(self, queue: SessionQueue, memory_bytes: int) -> list[SessionQueue]:
        """Notes what a session holds after a cell; returns the idle sessions to end if all together hold too much."""
        self.held_bytes += memory_bytes - queue.memory_bytes
        queue.memory_bytes = memory_bytes
        excess, victims = self.held_bytes - self._budget_bytes, []
        for other in self._queues.values():
            if excess <= 0:
                break
            if other is not queue and other.idle_session:
                excess -= other.memory_bytes
                victims.append(other)
        return victims

    def idle(self) -> SessionQueue | None:
        """Returns the least recently used idle session."""
        return next((queue for queue in self._queues.values() if queue.idle_session), None)


@dataclass(slots=True)
class Starts:
    """Counts failed starts of a tier's jail and of its slots. last_reason: the last printed cause."""

    failures: int = 0  # consecutive ones
    stillborn: int = 0  # consecutive slots that ended before they were ready
    paused_until: float = 0.0
    last_reason: str = ""

    def well(self) -> None:
        """Resets the counts, since a slot is ready."""
        self.failures = self.stillborn = 0

    def slot_failed(self, slots: int) -> bool:
        """Notes a slot that ended before it was ready; returns whether to blame the jail.

        slots: how many may end at once, with their jail.
        """
        self.stillborn += 1
        if self.stillborn <= 2 * slots + KILLS:
            return False
        self.stillborn = 0
        return True

    def failed(self, now: float, *, killed: bool) -> bool:
        """Notes a failed start; returns whether to give up for PAUSE_S."""
        self.failures += 1
        if self.failures < (KILLS if killed else STARTS):
            return False
        self.failures, self.paused_until = 0, now + PAUSE_S
        return True
