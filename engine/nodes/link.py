"""A stream of messages between two processes that outlives its connection. Pure: no socket, no clock.

Invariants
- What one side sends is taken by the other once and in order, or not yet; however often a connection breaks, and
  whatever it loses, delays or repeats.
- What was sent stays here until the other side has said that it has it.
"""

from __future__ import annotations

from collections import deque

from engine.nodes.messages import Numbered


class Link:
    """One side of a session.

    >>> here, there = Link(b"session"), Link(b"session")
    >>> first, second = here.send(b"a"), here.send(b"b")
    >>> there.take(second) is None  # the first one was lost
    True
    >>> [there.take(again) for again in here.unacknowledged()]
    [b'a', b'b']
    >>> here.acknowledge(there.received), here.waiting_bytes
    (None, 0)
    """

    def __init__(self, session: bytes) -> None:
        self.session = session
        self.received = 0  # messages taken
        self.waiting_bytes = 0  # sent, and not acknowledged
        self._sent = 0
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._last_ack = 0

    def send(self, body: bytes) -> Numbered:
        self._sent += 1
        self._waiting.append((self._sent, body))
        self.waiting_bytes += len(body)
        return self._numbered(self._sent, body)

    def take(self, message: Numbered) -> bytes | None:
        """Its body; None for one that was taken before, or that follows one which is missing."""
        self.acknowledge(message.ack)
        if message.seq != self.received + 1:
            return None
        self.received += 1
        return message.body

    def acknowledge(self, ack: int) -> None:
        """The other side has all up to this one."""
        while self._waiting and self._waiting[0][0] <= ack:
            _, body = self._waiting.popleft()
            self.waiting_bytes -= len(body)

    def beat(self, ack: int) -> list[Numbered]:
        """The other side's beat: what is to be sent again, if it took nothing since the beat before."""
        stuck = ack == self._last_ack
        self._last_ack = ack
        self.acknowledge(ack)
        return self.unacknowledged() if stuck else []

    def unacknowledged(self) -> list[Numbered]:
        return [self._numbered(seq, body) for seq, body in self._waiting]

    def _numbered(self, seq: int, body: bytes) -> Numbered:
        return Numbered(session=self.session, seq=seq, ack=self.received, body=body)
