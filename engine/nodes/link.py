"""A stream of messages between two processes that outlives its connection. Pure: no socket, no clock.

Invariants
- Each message is taken once and in order, however often a connection breaks and whatever it loses, delays or repeats.
- A message is kept until the other side has acknowledged it.
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
        """Returns the body of a message, None if it was taken before or follows a missing one."""
        self.acknowledge(message.ack)
        if message.seq != self.received + 1:
            return None
        self.received += 1
        return message.body

    def acknowledge(self, ack: int) -> None:
        """Drops the messages up to this one: the other side has them."""
        while self._waiting and self._waiting[0][0] <= ack:
            _, body = self._waiting.popleft()
            self.waiting_bytes -= len(body)

    def beat(self, ack: int) -> list[Numbered]:
        """Takes the other side's beat. Returns what to send again, if that side took nothing since its last beat."""
        stuck = ack == self._last_ack
        self._last_ack = ack
        self.acknowledge(ack)
        return self.unacknowledged() if stuck else []

    def unacknowledged(self) -> list[Numbered]:
        return [self._numbered(seq, body) for seq, body in self._waiting]

    def _numbered(self, seq: int, body: bytes) -> Numbered:
        return Numbered(session=self.session, seq=seq, ack=self.received, body=body)
