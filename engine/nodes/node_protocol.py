"""What a rollout node does with each message. It has no socket and no clock: a shell posts its messages and calls
`tick` each second.

Invariants
- Records are sent only of groups that are granted under this session, under the epoch of that grant. When the session
  is over, because the lead says so or is silent, no further turn begins, and the node says hello under a new session.
- Work that was begun until then is kept. If the lead grants the same attempt again, and its records are the first ones
  of that work, the node sends the rest at once and the work goes on. Work that is not granted again soon is dropped.
- A node that drains takes no more groups, and leaves when the lead has all records of those that it has, or when it may
  wait no longer. `drained` is called once the lead has ended the session, or is silent.
- A record is kept until the lead has it (`engine.nodes.link`). A node that would have to keep too many drops them and
  ends its session.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.nodes.ledger import KEPT_BEATS, SILENT_BEATS, Key
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
    Leave,
    Load,
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

WAITING_BYTES = 256 << 20  # the most bytes of records that the lead has not acknowledged
MAX_PAUSE = 2  # the most beats between two hellos


class NodeEvents(Protocol):
    """What the protocol calls as things happen. work: a number that this node gives each group that it starts."""

    def start(self, key: Key, work: int, records: list[bytes]) -> None: ...

    def stop(self, work: int) -> None:
        """Nobody wants the group any more. It may have ended already."""
        ...

    def hold(self, on: bool) -> None:
        """Stops turns from beginning while the lead is away (on), or lets them begin."""
        ...

    def weights(self, announce: Announce) -> None:
        """Weights can be pulled. They are loaded at once, or when `load` says so."""
        ...

    def load(self, version: int) -> None: ...

    def refused(self, reason: str) -> None: ...

    def bye(self) -> None: ...

    def drained(self) -> None:
        """The node has left, as it was told to."""
        ...

    def note(self, line: str) -> None: ...


@dataclass(slots=True)
class _Work:
    """A group that is made here.

    epoch: that of its grant, None between two sessions. records: all of the group's, those of the grant included.
    told_at: the number of its last message once it is finished.
    """

    number: int
    epoch: int | None
    records: list[bytes]
    told_at: int | None = None
    finished: bool = False


class NodeProtocol:
    def __init__(
        self,
        *,
        name: str,
        build: Build,
        capacity_tokens: int,
        replicas: int,
        make_session: Callable[[], bytes],
        post: Callable[[ToLead], None],
        events: NodeEvents,
        gpus: Sequence[str] = (),
    ) -> None:
        self._process, self._gpus = make_session(), list(gpus)
        self.leaving = False  # it was told to leave
        self._leaves = False  # it says so to the lead now
        self._name, self._build, self._capacity_tokens, self._replicas = name, build, capacity_tokens, replicas
        self._make_session, self._post, self._events = make_session, post, events
        self._numbers = itertools.count(1)
        self._work: dict[Key, _Work] = {}
        self.silent = 0  # beats since the lead was heard
        self._begin()

    def _begin(self) -> None:
        self._link = Link(self._make_session())
        self._greeted = False  # a hello of this session was sent
        self.welcomed = False
        self._pause, self._until_hello = 1, 0
        self._lead_beats = 0

    @property
    def held(self) -> list[Key]:
        """The attempts that are made under this session."""
        return sorted(key for key, work in self._work.items() if work.epoch is not None and not work.finished)

    def drain(self) -> None:
        """Takes no more groups, and leaves when those that it has are made."""
        self.leaving = True

    def leave(self) -> None:
        """Leaves now. What is not made goes to others, which continue after the last turn that the lead has."""
        self.leaving = self._leaves = True
        self._drop(list(self._work))
        if self._greeted:
            self._post(Leave(session=self._link.session))

    def tick(self, *, version: int, pulled: int, free_tokens: int, tokens: int) -> None:
        """Sends a hello or a beat. It is called each second of the node's, and whenever its weights have changed."""
        if self.leaving and not self.welcomed:
            self.leave()
            self._events.drained()
            return
        if not self.welcomed:
            self._hello()
            return
        self.silent += 1
        if self._leaves or (self.leaving and not self.held and not self._link.waiting_bytes):
            self.leave()
        if self.silent > SILENT_BEATS:
            self._end("the lead is silent")
            return
        self._post(
            NodeBeat(
                session=self._link.session,
                ack=self._link.received,
                version=version,
                pulled=pulled,
                free_tokens=free_tokens,
                tokens=tokens,
                leaving=self.leaving,
            )
        )

    def receive(self, message: ToNode) -> None:
        match message:
            case Refused():
                self._events.refused(message.reason)
            case Welcome() if message.session == self._link.session:
                self._welcome()
            case Fenced() if message.session == self._link.session and self._leaves:
                self._events.drained()
            case Fenced() if message.session == self._link.session:
                self._end("the lead has given its groups to others")
            case LeadBeat() if message.session == self._link.session:
                self._beat(message)
            case Numbered() if message.session == self._link.session:
                self._welcome()
                body = self._link.take(message)
                if body is not None:
                    self._order(body)
            case _:
                pass  # the message is of a session that is over

    def tell(self, key: Key, number: int, record: bytes, *, last: bool = False) -> None:
        """Sends a record of a group, unless nobody wants the group any more.

        number: that of the work. last: whether the record is the decision about the group.
        """
        work = self._work.get(key)
        if work is None or work.number != number:
            return
        work.records.append(record)
        work.finished = last
        if work.epoch is not None:
            self._send(key, work, record)
        if self._link.waiting_bytes > WAITING_BYTES:
            self._drop(list(self._work))
            self._end(f"the lead does not acknowledge records: {WAITING_BYTES >> 20} MiB wait, and all work is dropped")

    def _send(self, key: Key, work: _Work, record: bytes) -> None:
        assert work.epoch is not None
        message = Record(lease=key.lease, attempt=key.attempt, epoch=work.epoch, record=record)
        numbered = self._link.send(encode(message))
        if work.finished:
            work.told_at = numbered.seq
        self._post(numbered)

    def happened(self, segment: bytes) -> None:
        """Sends what happened here, for the run's record. Outside of a session it is lost, which the record allows."""
        if self.welcomed:
            self._post(Happened(session=self._link.session, segment=segment))

    def _hello(self) -> None:
        self._until_hello -= 1
        if self._until_hello > 0:
            return
        self._pause = self._until_hello = min(2 * self._pause, MAX_PAUSE)
        self._greeted = True
        self._post(
            Hello(
                session=self._link.session,
                name=self._name,
                build=self._build,
                capacity_tokens=self._capacity_tokens,
                replicas=self._replicas,
                kept=[(key.lease, key.attempt) for key in sorted(self._work)],
                process=self._process,
                gpus=self._gpus,
            )
        )

    def _welcome(self) -> None:
        self.silent = 0
        if not self.welcomed:
            self.welcomed = True
            self._events.hold(False)
            self._events.note("joined the run")

    def _beat(self, beat: LeadBeat) -> None:
        self.silent = 0
        for numbered in self._link.beat(beat.ack):
            self._post(numbered)
        done = [key for key, work in self._work.items() if work.told_at is not None and work.told_at <= beat.ack]
        for key in done:
            del self._work[key]
        self._lead_beats += 1
        if self._lead_beats == KEPT_BEATS:
            self._drop_not_granted()

    def _order(self, body: bytes) -> None:
        match order := decode_order(body):
            case Grant():
                self._grant(order)
            case Cancel():
                key = Key(order.lease, order.attempt)
                work = self._work.get(key)
                if work is not None and work.epoch == order.epoch:
                    self._drop([key])
            case Announce():
                self._events.weights(order)
            case Load():
                self._events.load(order.version)
            case Bye():
                self._events.bye()

    def _grant(self, order: Grant) -> None:
        key, known = Key(order.lease, order.attempt), order.records
        kept = self._work.get(key)
        if kept is not None and kept.records[: len(known)] == known:
            kept.epoch = order.epoch
            for record in kept.records[len(known) :]:
                self._send(key, kept, record)
            return
        if kept is not None:
            self._drop([key])
        work = self._work[key] = _Work(next(self._numbers), order.epoch, list(known))
        self._events.start(key, work.number, known)

    def _drop_not_granted(self) -> None:
        """Drops the work that this node had begun under an earlier session, and that was not granted again."""
        keys = [key for key, work in self._work.items() if work.epoch is None]
        if keys:
            self._events.note(f"drops {len(keys)} groups that it had begun: the lead has given them to others")
            self._drop(keys)

    def _drop(self, keys: list[Key]) -> None:
        for key in keys:
            work = self._work.pop(key)
            if not work.finished:
                self._events.stop(work.number)

    def _end(self, why: str) -> None:
        kept = f"; the work on {len(self._work)} groups is kept until it is back" if self._work else ""
        self._events.note(f"{why}{kept}")
        self._events.hold(True)
        for work in self._work.values():
            work.epoch = work.told_at = None
        self._begin()
        self.silent = 0
