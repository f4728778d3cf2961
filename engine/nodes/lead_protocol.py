"""What the lead does with each message: sessions, grants, records, fences. It has no socket and no clock: a shell posts
its messages and calls `tick` each second.

Invariants
- The accepted records of an attempt continue one another: a record under an older epoch is dropped, and a grant carries
  all records that were accepted before it.
- For each wanted attempt `group` is called once, unless it is withdrawn.
- A node of another build is refused with the difference, and one with GPUs that the lead or another node has. A node
  whose session is over is told so.
- A node that leaves gives back all that it has not made, at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.nodes.config import check_name
from engine.nodes.ledger import Granted, Key, Ledger, Member
from engine.nodes.link import Link
from engine.nodes.messages import (
    Announce,
    BadMessage,
    Build,
    Bye,
    Cancel,
    Fenced,
    Grant,
    Happened,
    Hello,
    Job,
    LeadBeat,
    Leave,
    Load,
    NodeBeat,
    Numbered,
    Order,
    Record,
    Refused,
    ToNode,
    Welcome,
    decode_record,
    encode,
)

MOST = 1 << 50  # a node must claim fewer tokens, and fewer replicas
HERE = b""  # the session of the lead's own replicas


class LeadEvents(Protocol):
    """What the protocol calls as things happen."""

    def record(self, key: Key, record: bytes) -> int | None:
        """Writes a record down. Returns the group's tokens if the record ends it. Raises BadMessage for a bad one."""
        ...

    def group(self, key: Key, name: str) -> None:
        """The group is made. name: the node that made it, "" for the lead itself."""
        ...

    def happened(self, name: str, segment: bytes) -> None:
        """A node sent what happened there, for the run's record."""
        ...

    def granted(self, key: Key, node: str) -> None:
        """The group is granted to the node of this name."""
        ...

    def start_here(self, key: Key, epoch: int, records: list[bytes]) -> None:
        """The group is granted to the lead's own replicas."""
        ...

    def stop_here(self, key: Key) -> None: ...

    def note(self, line: str) -> None:
        """Tells the user and the timeline who came, who went, and why."""
        ...


@dataclass(slots=True)
class _Peer:
    """A node with a session. address: that of its newest connection."""

    address: bytes
    link: Link


class LeadProtocol:
    """gather: beats before the first grant. After a restart nodes come back in them with what they had begun."""

    def __init__(
        self,
        ledger: Ledger,
        job: Job,
        post: Callable[[bytes, ToNode], None],
        events: LeadEvents,
        *,
        gather: int = 0,
    ) -> None:
        self._gather = gather
        self.ledger = ledger
        self._job = job
        self._post = post
        self._events = events
        self._peers: dict[bytes, _Peer] = {}
        self.tokens = 0  # tokens that all nodes have sampled, those that have left among them
        self._counted: dict[bytes, int] = {}  # the tokens at the last beat of each session
        self._over: set[bytes] = set()  # sessions that are over
        self._records: dict[Key, list[bytes]] = {}
        self._announced: Announce | None = None

    @property
    def nodes(self) -> list[Member]:
        return [member for session, member in self.ledger.members.items() if session != HERE]

    @property
    def taken(self) -> dict[str, str]:
        """Returns the GPUs that the run uses, each with the name of who has it."""
        return {**self._job.taken, **self.ledger.taken()}

    def join_here(self, *, capacity_tokens: int) -> None:
        self.ledger.join(HERE, "the lead", capacity_tokens=capacity_tokens, lasting=True)

    def beat_here(self, *, version: int, free_tokens: int) -> None:
        self.ledger.beat(HERE, version=version, free_tokens=free_tokens)
        self._decide()

    def want(self, key: Key, *, min_version: int, records: list[bytes]) -> None:
        """Has the group of this attempt made. records: its prompt, and what is known of its trajectories."""
        self._records[key] = list(records)
        self.ledger.want(key, min_version=min_version)
        self._decide()

    def withdraw(self, key: Key) -> None:
        """Stops an attempt for which nobody waits any more. Idempotent."""
        self._records.pop(key, None)
        granted = self.ledger.withdraw(key)
        if granted is None:
            return
        if granted.session == HERE:
            self._events.stop_here(key)
        else:
            self._order(granted.session, Cancel(lease=key.lease, attempt=key.attempt, epoch=granted.epoch))
        self._decide()

    def announce(self, announce: Announce) -> None:
        self._announced = announce
        for session in list(self._peers):
            self._order(session, announce)

    def bye(self) -> None:
        """Tells all nodes that the run has ended."""
        for session in list(self._peers):
            self._order(session, Bye())

    @property
    def unheard(self) -> int:
        """How many nodes have not acknowledged all that was sent to them."""
        return sum(peer.link.waiting_bytes > 0 for peer in self._peers.values())

    def tick(self) -> None:
        """Fences silent nodes and grants what waits. It is called each second of the lead's."""
        for session in self.ledger.tick():
            self._fence(session, "was silent")
        self._gather = max(0, self._gather - 1)
        self._decide()

    def receive(self, address: bytes, message: Hello | NodeBeat | Leave | Happened | Numbered) -> None:
        match message:
            case Hello():
                self._hello(address, message)
            case NodeBeat() | Leave() | Happened() | Numbered():
                if not self.ledger.heard(message.session) or message.session not in self._peers:
                    self._post(address, Fenced(session=message.session))
                    return
                self._peers[message.session].address = address
                match message:
                    case NodeBeat():
                        self._beat(message)
                    case Leave():
                        self._fence(message.session, "leaves")
                    case Happened():
                        name = self.ledger.members[message.session].name
                        self._events.happened(name, message.segment)
                    case Numbered():
                        self._numbered(message)

    def here(self, key: Key, epoch: int, record: bytes) -> None:
        """Takes a record of a group that the lead's own replicas make."""
        self._take(HERE, Record(lease=key.lease, attempt=key.attempt, epoch=epoch, record=record))

    def _hello(self, address: bytes, hello: Hello) -> None:
        session = hello.session
        if session in self._peers:  # a repeated hello
            self._peers[session].address = address
        elif session in self._over or session == HERE:
            self._post(address, Fenced(session=session))
            return
        elif reason := unfit(hello) or difference(self._job.build, hello.build) or self._overlap(hello):
            self._events.note(f"node {hello.name[:100]} is refused: {reason[:1000]}")
            self._post(address, Refused(reason=reason))
            return
        else:
            self._peers[session] = _Peer(address, Link(session))
            kept = frozenset(Key(lease, attempt) for lease, attempt in hello.kept)
            self.ledger.join(
                session,
                hello.name,
                capacity_tokens=hello.capacity_tokens,
                replicas=hello.replicas,
                kept=kept,
                process=hello.process,
                gpus=frozenset(hello.gpus),
            )
            self._events.note(f"node {hello.name} joins with room for {hello.capacity_tokens} tokens")
            self._post(address, Welcome(session=session))
            if self._announced is not None:
                self._order(session, self._announced)
            return
        self._post(address, Welcome(session=session))

    def _overlap(self, hello: Hello) -> str | None:
        return overlap(hello.gpus, {**self._job.taken, **self.ledger.taken(process=hello.process)})

    def _beat(self, beat: NodeBeat) -> None:
        peer = self._peers[beat.session]
        member = self.ledger.members[beat.session]
        if beat.leaving and not member.leaving:
            member.leaving = True
            self._events.note(f"node {member.name} is about to leave; first it makes its {len(member.held)} groups")
        # A node counts on over its sessions, so what the first beat of one says is counted already.
        self.tokens += beat.tokens - self._counted.get(beat.session, beat.tokens)
        self._counted[beat.session] = beat.tokens
        self.ledger.beat(beat.session, version=beat.version, free_tokens=beat.free_tokens, pulled=beat.pulled)
        self._post(peer.address, LeadBeat(session=beat.session, ack=peer.link.received))
        for numbered in peer.link.beat(beat.ack):
            self._post(peer.address, numbered)
        self._decide()

    def _numbered(self, message: Numbered) -> None:
        body = self._peers[message.session].link.take(message)
        if body is None:
            return
        try:
            self._take(message.session, decode_record(body))
        except BadMessage as error:
            self._fence(message.session, f"sent a bad record: {error}")

    def _take(self, session: bytes, message: Record) -> None:
        key = Key(message.lease, message.attempt)
        if not self.ledger.accepts(session, key, message.epoch):
            return
        tokens = self._events.record(key, message.record)
        self._records[key].append(message.record)
        if tokens is not None:
            self.ledger.finish(key, tokens)
            name = "" if session == HERE else self.ledger.members[session].name
            del self._records[key]
            self._events.group(key, name)
            self._decide()

    def _fence(self, session: bytes, why: str) -> None:
        member = self.ledger.members[session]
        back = self.ledger.leave(session)
        peer = self._peers.pop(session)
        self._over.add(session)
        self._events.note(f"node {member.name} {why}" + (f"; its {len(back)} groups go to others" if back else ""))
        self._post(peer.address, Fenced(session=session))
        self._decide()

    def _decide(self) -> None:
        if self._gather:
            return
        for granted in self.ledger.decide():
            self._grant(granted)
        if self._announced is not None and not self._announced.at_once:
            for member in self.ledger.may_load(self._announced.version):
                self._order(member.session, Load(version=self._announced.version))

    def _grant(self, granted: Granted) -> None:
        key, records = granted.key, list(self._records[granted.key])
        if granted.session == HERE:
            self._events.start_here(key, granted.epoch, records)
        else:
            grant = Grant(lease=key.lease, attempt=key.attempt, epoch=granted.epoch, records=records)
            self._order(granted.session, grant)
            self._events.granted(key, self.ledger.members[granted.session].name)

    def _order(self, session: bytes, order: Order) -> None:
        peer = self._peers[session]
        self._post(peer.address, peer.link.send(encode(order)))


def unfit(hello: Hello) -> str | None:
    """Returns why nobody can take part as this node, None if it can."""
    try:
        check_name(hello.name)
    except ValueError as error:
        return str(error)
    if not 0 <= hello.capacity_tokens < MOST or not 0 < hello.replicas < MOST:
        return f"it claims {hello.replicas} replicas with room for {hello.capacity_tokens} tokens"
    return None


def overlap(gpus: Sequence[str], taken: Mapping[str, str]) -> str | None:
    """Returns why a node cannot have these GPUs, None if nobody has them.

    >>> overlap(["GPU-a", "GPU-b"], {"GPU-b": "the lead"})
    'the lead uses GPU-b already. Fix: devices=... with other GPUs on one of them'
    """
    both = [gpu for gpu in gpus if gpu in taken]
    if not both:
        return None
    owners = " and ".join(sorted({taken[gpu] for gpu in both}))
    return f"{owners} uses {', '.join(both)} already. Fix: devices=... with other GPUs on one of them"


def difference(lead: Build, node: Build) -> str | None:
    """Returns why a node of this build cannot take part, None if it can."""
    if lead.protocol != node.protocol:
        return f"the lead speaks protocol {lead.protocol}, the node {node.protocol}. Fix: the same version on both"
    for name in sorted({*lead.versions, *node.versions}):
        here, there = lead.versions.get(name, "none"), node.versions.get(name, "none")
        if here != there:
            return f"{name} is {here} on the lead and {there} on the node. Fix: install the same version on both"
    if lead.code != node.code:
        return (
            f"the code is {lead.code[:12]} on the lead and {node.code[:12]} on the node. Fix: the same sources on both"
        )
    return None
