"""What a rollout node does with each message. No socket and no clock: a shell posts what it says and calls `tick` each
second.

Invariants
- Records are told only of what is granted under this session. When the session is over, by the lead's word or by its
  silence, all that was granted is stopped, and the node says hello under a new one.
- What was told stays here until the lead has it (`engine.nodes.link`); a node that would have to keep too much ends its
  session instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.nodes.ledger import SILENT_BEATS, Key
from engine.nodes.link import Link
from engine.nodes.messages import (
    Announce,
    Build,
    Bye,
    Cancel,
    Fenced,
    Grant,
    Happened,
    Hello,
    LeadBeat,
    NodeBeat,
    Numbered,
    Record,
    Refused,
    ToLead,
    ToNode,
    Welcome,
    decode_order,
    encode,
)

WAITING_BYTES = 256 << 20  # of records that the lead has not taken
MAX_PAUSE = 8  # beats between two hellos


class NodeEvents(Protocol):
    """What the protocol calls as things happen."""

    def start(self, key: Key, epoch: int, records: list[bytes]) -> None: ...

    def stop(self, key: Key, epoch: int) -> None:
        """Nobody wants it any more. It may have ended."""
        ...

    def weights(self, announce: Announce) -> None: ...

    def refused(self, reason: str) -> None: ...

    def bye(self) -> None: ...

    def note(self, line: str) -> None: ...


class NodeProtocol:
    def __init__(
        self,
        *,
        name: str,
        build: Build,
        capacity_tokens: int,
        make_session: Callable[[], bytes],
        post: Callable[[ToLead], None],
        events: NodeEvents,
    ) -> None:
        self._name, self._build, self._capacity_tokens = name, build, capacity_tokens
        self._make_session, self._post, self._events = make_session, post, events
        self.silent = 0  # beats since the lead was heard
        self._begin()

    def _begin(self) -> None:
        self._link = Link(self._make_session())
        self._granted: dict[Key, int] = {}
        self.welcomed = False
        self._pause, self._until_hello = 1, 0

    @property
    def held(self) -> list[Key]:
        return sorted(self._granted)

    def tick(self, *, version: int, free_tokens: int, tokens: int) -> None:
        """Each second of the node's, and whenever its weights have changed."""
        if not self.welcomed:
            self._hello()
            return
        self.silent += 1
        if self.silent > SILENT_BEATS:
            self._end("the lead is silent")
            return
        self._post(
            NodeBeat(
                session=self._link.session,
                ack=self._link.received,
                version=version,
                free_tokens=free_tokens,
                tokens=tokens,
            )
        )

    def receive(self, message: ToNode) -> None:
        match message:
            case Refused():
                self._events.refused(message.reason)
            case Welcome() if message.session == self._link.session:
                self._welcome()
            case Fenced() if message.session == self._link.session:
                self._end("the lead has given its groups to others")
            case LeadBeat() if message.session == self._link.session:
                self.silent = 0
                for numbered in self._link.beat(message.ack):
                    self._post(numbered)
            case Numbered() if message.session == self._link.session:
                self._welcome()
                body = self._link.take(message)
                if body is not None:
                    self._order(body)
            case _:
                pass  # of a session that is over

    def tell(self, key: Key, epoch: int, record: bytes, *, last: bool = False) -> None:
        """A record of a group. last: its decision. Of one that is not granted any more nothing is said."""
        if self._granted.get(key) != epoch:
            return
        if last:
            del self._granted[key]
        told = Record(lease=key.lease, attempt=key.attempt, epoch=epoch, record=record)
        self._post(self._link.send(encode(told)))
        if self._link.waiting_bytes > WAITING_BYTES:
            self._end(f"the lead does not take what is told: {WAITING_BYTES >> 20} MiB wait")

    def happened(self, epoch: float, segment: bytes) -> None:
        """For the run's record, which can do without: outside of a session it is lost."""
        if self.welcomed:
            self._post(Happened(session=self._link.session, epoch=epoch, segment=segment))

    def _hello(self) -> None:
        self._until_hello -= 1
        if self._until_hello > 0:
            return
        self._pause = self._until_hello = min(2 * self._pause, MAX_PAUSE)
        self._post(
            Hello(
                session=self._link.session,
                name=self._name,
                build=self._build,
                capacity_tokens=self._capacity_tokens,
            )
        )

    def _welcome(self) -> None:
        self.silent = 0
        if not self.welcomed:
            self.welcomed = True
            self._events.note("joined the run")

    def _order(self, body: bytes) -> None:
        match order := decode_order(body):
            case Grant():
                key = Key(order.lease, order.attempt)
                self._granted[key] = order.epoch
                self._events.start(key, order.epoch, order.records)
            case Cancel():
                key = Key(order.lease, order.attempt)
                if self._granted.get(key) == order.epoch:
                    del self._granted[key]
                    self._events.stop(key, order.epoch)
            case Announce():
                self._events.weights(order)
            case Bye():
                self._events.bye()

    def _end(self, why: str) -> None:
        stopped = self._granted
        self._events.note(f"{why}; {len(stopped)} groups are dropped")
        self._begin()
        self.silent = 0
        for key, epoch in stopped.items():
            self._events.stop(key, epoch)
