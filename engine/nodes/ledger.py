"""Which node has which group lease. Pure: events go in, grants and fences come out.

Invariants
- An attempt of a lease is granted to one member at a time, under an epoch that was never given before; only what comes
  under the last epoch counts.
- An attempt that is wanted is waiting, granted, or finished. A member that leaves or is fenced gives back all that it
  had.
- An attempt goes only to a member whose live weights are recent enough for its step.
- Only so many nodes load new weights at once that a quarter of all replicas pauses, or one. A node counts once: a
  session that a newer one of its name replaced has no replicas and no place among those that load.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.fleet.config import PAUSED_SHARE

SILENT_BEATS = 5  # without a sign of life, after which a node is fenced
KEPT_BEATS = 3  # of a new session, after which a node drops what it had begun before and was not granted again
ALIVE_BEATS = 3  # of a session after a newer one of its name came: it is another node of that name, not a dead one


class Key(NamedTuple):
    """One attempt of a lease (0, then one more with each refill)."""

    lease: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Granted:
    session: bytes
    key: Key
    epoch: int


@dataclass(kw_only=True, slots=True)
class Member:
    """A node with a session. version: of its live weights; pulled: of those that it has a copy of; loading: the version
    that it was told to load. free_tokens: of its KV caches, at its last beat; since: what was granted after that. held:
    epochs by attempt. kept: attempts that it has begun under a session before. silent: beats of the lead since it was
    heard. replaced: beats that it had sent when a newer session of its name came.
    """

    session: bytes
    name: str
    capacity_tokens: int
    replicas: int = 1
    version: int = -1
    pulled: int = -1
    loading: int | None = None
    free_tokens: int = 0
    since: set[Key] = field(default_factory=set)
    held: dict[Key, int] = field(default_factory=dict)
    kept: frozenset[Key] = frozenset()
    beats: int = 0
    replaced: int | None = None
    silent: int = 0
    lasting: bool = False  # the lead's own replicas: never fenced

    @property
    def pausing(self) -> int:
        """Replicas that pause at once while it loads weights."""
        return max(1, int(PAUSED_SHARE * self.replicas))

    @property
    def counts(self) -> bool:
        """Whether it is a node of its own, and not an older session of one that began again."""
        return self.replaced is None or self.beats >= self.replaced + ALIVE_BEATS


class Ledger:
    """group_tokens: what a group may take at most, which is expected of it until some have ended.

    >>> ledger = Ledger(group_tokens=100)
    >>> ledger.join(b"a", "one", capacity_tokens=1000)
    >>> ledger.beat(b"a", version=3, free_tokens=1000)
    >>> ledger.want(Key(7, 0), min_version=3)
    >>> [granted] = ledger.decide()
    >>> granted.session, granted.key, ledger.accepts(b"a", granted.key, granted.epoch)
    (b'a', Key(lease=7, attempt=0), True)
    >>> ledger.leave(b"a")
    [Key(lease=7, attempt=0)]
    >>> ledger.accepts(b"a", granted.key, granted.epoch)
    False
    """

    def __init__(self, *, group_tokens: int) -> None:
        self.members: dict[bytes, Member] = {}
        self._group_tokens = group_tokens
        self._finished, self._finished_tokens = 0, 0
        self._waiting: dict[Key, int] = {}  # the least version
        self._granted: dict[Key, tuple[Granted, int]] = {}  # with the least version
        self._epochs = itertools.count(1)

    @property
    def expected_tokens(self) -> float:
        """Returns the expected tokens of a group: the mean of those that have ended."""
        return self._finished_tokens / self._finished if self._finished else self._group_tokens

    @property
    def waiting(self) -> list[Key]:
        return sorted(self._waiting)

    def join(
        self,
        session: bytes,
        name: str,
        *,
        capacity_tokens: int,
        replicas: int = 1,
        kept: frozenset[Key] = frozenset(),
        lasting: bool = False,
    ) -> None:
        assert session not in self.members, name
        for member in self.members.values():
            if member.name == name:
                member.replaced, member.loading = member.beats, None
        self.members[session] = Member(
            session=session,
            name=name,
            capacity_tokens=capacity_tokens,
            replicas=replicas,
            free_tokens=capacity_tokens,
            kept=kept,
            lasting=lasting,
        )

    def leave(self, session: bytes) -> list[Key]:
        """Its session is over; what it had waits again, and is returned."""
        member = self.members.pop(session, None)
        back = sorted(member.held) if member is not None else []
        for key in back:
            _, self._waiting[key] = self._granted.pop(key)
        return back

    def heard(self, session: bytes) -> bool:
        """A sign of life. False: there is no such session."""
        member = self.members.get(session)
        if member is not None:
            member.silent = 0
        return member is not None

    def beat(self, session: bytes, *, version: int, free_tokens: int, pulled: int = -1) -> None:
        member = self.members[session]
        member.version, member.pulled, member.free_tokens = version, pulled, free_tokens
        if member.loading != pulled or version == pulled:
            member.loading = None  # it has them, or has a newer version to load
        member.since.clear()
        member.beats += 1
        if member.beats == KEPT_BEATS:
            member.kept = frozenset()

    def tick(self) -> list[bytes]:
        """A second of the lead's has passed: the sessions that are over. `leave` follows for each.

        The lead's own beats are counted, not seconds: none pass while it stands still itself.
        """
        for member in self.members.values():
            member.silent += 0 if member.lasting else 1
        return [member.session for member in self.members.values() if member.silent > SILENT_BEATS]

    def want(self, key: Key, *, min_version: int) -> None:
        assert key not in self._waiting and key not in self._granted, key  # noqa: PT018
        self._waiting[key] = min_version

    def withdraw(self, key: Key) -> Granted | None:
        """It is not wanted any more; returns who has it."""
        self._waiting.pop(key, None)
        granted, _ = self._granted.pop(key, (None, 0))
        if granted is not None:
            self._take_from(granted)
        return granted

    def accepts(self, session: bytes, key: Key, epoch: int) -> bool:
        """Whether what comes under this epoch counts."""
        granted, _ = self._granted.get(key, (None, 0))
        return granted == Granted(session=session, key=key, epoch=epoch)

    def finish(self, key: Key, tokens: int) -> None:
        """The member that has it has made the group. tokens: of its trajectories."""
        granted, _ = self._granted.pop(key)
        self._take_from(granted)
        self._finished += 1
        self._finished_tokens += tokens

    def decide(self) -> list[Granted]:
        """New grants: the oldest attempt first, each to the member that had begun it, else to the one with most
        predicted free KV.

        One that predicts no room for another group gets none, unless it has nothing to do.
        """
        new = []
        for key, min_version in sorted(self._waiting.items()):
            able = [member for member in self.members.values() if member.version >= min_version]
            begun = [member for member in able if key in member.kept]  # its room was there already
            roomy = [member for member in able if not member.held or self._free(member) >= self.expected_tokens]
            if not begun and not roomy:
                continue
            member = max(begun or roomy, key=lambda member: (self._free(member), -len(member.held)))
            granted = Granted(session=member.session, key=key, epoch=next(self._epochs))
            self._granted[key] = granted, self._waiting.pop(key)
            member.held[key] = granted.epoch
            member.since.add(key)
            new.append(granted)
        return new

    def may_load(self, version: int) -> list[Member]:
        """Those that are to load this version, of which they have a copy, now."""
        nodes = [member for member in self.members.values() if member.counts and not member.lasting]
        left = max(1, int(PAUSED_SHARE * sum(member.replicas for member in nodes)))
        left -= sum(member.pausing for member in nodes if member.loading is not None)
        found = []
        for member in sorted(nodes, key=lambda member: len(member.held)):
            if member.pulled != version or version in (member.version, member.loading):
                continue
            if member.pausing > left:
                break
            left -= member.pausing
            member.loading = version
            found.append(member)
        return found

    def _free(self, member: Member) -> float:
        """Predicted: what all that it has will need is taken off, whether it is there already or not."""
        room = member.capacity_tokens - len(member.held) * self.expected_tokens
        seen = member.free_tokens - len(member.since) * self.expected_tokens
        return min(room, seen)

    def _take_from(self, granted: Granted) -> None:
        member = self.members[granted.session]
        del member.held[granted.key]
        member.since.discard(granted.key)
