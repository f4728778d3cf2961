"""Which node has which group lease. Pure: events go in, grants and fences come out.

Invariants
- An attempt of a lease is granted to one member at a time, under an epoch that was never given before; only records
  under the last epoch count.
- An attempt that is wanted is waiting, granted, or finished. A member that leaves or is fenced gives back all that it
  had.
- An attempt goes only to a member whose live weights are recent enough for its step, and that is not leaving.
- Nodes load new weights in turns, so that at most a quarter of all replicas pauses at once, or one. A node counts once:
  a session that was replaced by a newer one of its name counts no replicas and loads nothing. A node that is leaving
  still samples, so its replicas count, but it is not told to load.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.fleet.config import PAUSED_SHARE

SILENT_BEATS = 5  # after so many beats without a sign of life, a node is fenced
KEPT_BEATS = 3  # after so many beats of a new session, a node drops what it had begun before and was not granted again
HEARD_BEATS = 2  # a member that was heard so many beats ago still has its GPUs
ALIVE_BEATS = 3  # a session that beats so often after a newer one of its name came is another node, not a dead one


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
    """A node with a session.

    version: that of its live weights. pulled: the newest version of which it has a copy. loading: the version that it
    was told to load. free_tokens: free in its KV caches at its last beat. since: what was granted after that beat.
    held: epochs by attempt. kept: attempts that it had begun under an earlier session. silent: beats of the lead since
    its last message. replaced: how many beats it had sent when a newer session of its name came, None without one.
    process: names the process through all of its sessions. gpus: those of its replicas. leaving: it takes no more
    groups.
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
    process: bytes = b""
    gpus: frozenset[str] = frozenset()
    leaving: bool = False
    lasting: bool = False  # whether it is the lead's own replicas, which are never fenced

    @property
    def pausing(self) -> int:
        """How many replicas pause at once while it loads weights."""
        return max(1, int(PAUSED_SHARE * self.replicas))

    @property
    def counts(self) -> bool:
        """Whether it is a node of its own, and not an older session of one that began again."""
        return self.replaced is None or self.beats >= self.replaced + ALIVE_BEATS


class Ledger:
    """group_tokens: the most tokens that a group may take. So many are expected until some groups have ended.

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
        self._waiting: dict[Key, int] = {}  # min_version by attempt
        self._granted: dict[Key, tuple[Granted, int]] = {}  # each with its min_version
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
        process: bytes = b"",
        gpus: frozenset[str] = frozenset(),
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
            process=process,
            gpus=gpus,
            lasting=lasting,
        )

    def taken(self, *, process: bytes = b"") -> dict[str, str]:
        """Returns the GPUs that members have, each with the member's name. process: one whose own are left out.

        Those of a member that has been silent for a while are free: it is most likely dead, and fenced soon.
        """
        others = [member for member in self.members.values() if not process or member.process != process]
        heard = [member for member in others if member.silent <= HEARD_BEATS]
        return {gpu: member.name for member in heard for gpu in member.gpus}

    def leave(self, session: bytes) -> list[Key]:
        """Ends a session. Returns the attempts that it had, which wait again."""
        member = self.members.pop(session, None)
        back = sorted(member.held) if member is not None else []
        for key in back:
            _, self._waiting[key] = self._granted.pop(key)
        return back

    def heard(self, session: bytes) -> bool:
        """Notes a sign of life. Returns whether there is such a session."""
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
        """Counts a beat of the lead. Returns the sessions that are over; the caller calls `leave` for each.

        The ledger counts the lead's beats and not seconds, because none pass while the lead itself is stopped.
        """
        for member in self.members.values():
            member.silent += 0 if member.lasting else 1
        return [member.session for member in self.members.values() if member.silent > SILENT_BEATS]

    def want(self, key: Key, *, min_version: int) -> None:
        assert key not in self._waiting and key not in self._granted, key  # noqa: PT018
        self._waiting[key] = min_version

    def withdraw(self, key: Key) -> Granted | None:
        """Removes an attempt that is not wanted any more. Returns its grant, if it has one."""
        self._waiting.pop(key, None)
        granted, _ = self._granted.pop(key, (None, 0))
        if granted is not None:
            self._take_from(granted)
        return granted

    def accepts(self, session: bytes, key: Key, epoch: int) -> bool:
        """Returns whether a record under this epoch counts."""
        granted, _ = self._granted.get(key, (None, 0))
        return granted == Granted(session=session, key=key, epoch=epoch)

    def finish(self, key: Key, tokens: int) -> None:
        """Notes that the group is made by the member that has it. tokens: the sum over its trajectories."""
        granted, _ = self._granted.pop(key)
        self._take_from(granted)
        self._finished += 1
        self._finished_tokens += tokens

    def decide(self) -> list[Granted]:
        """Returns new grants, the oldest attempt first.

        Each goes to the member that had begun it, else to the one with most predicted free KV. A member without room
        for another group gets none, unless it has nothing to do.
        """
        new = []
        for key, min_version in sorted(self._waiting.items()):
            staying = [member for member in self.members.values() if not member.leaving]
            able = [member for member in staying if member.version >= min_version]
            begun = [member for member in able if key in member.kept]  # these have the group's tokens already
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
        """Returns the members that are to load this version now. Each has a copy of it."""
        nodes = [member for member in self.members.values() if member.counts and not member.lasting]
        may_pause = max(1, int(PAUSED_SHARE * sum(member.replicas for member in nodes)))
        may_pause -= sum(member.pausing for member in nodes if member.loading is not None)
        chosen = []
        for member in sorted(nodes, key=lambda member: len(member.held)):
            if member.leaving or member.pulled != version or version in (member.version, member.loading):
                continue
            if member.pausing > may_pause:
                break
            may_pause -= member.pausing
            member.loading = version
            chosen.append(member)
        return chosen

    def _free(self, member: Member) -> float:
        """Returns the predicted free tokens. What its groups are expected to need is subtracted, allocated or not."""
        of_capacity = member.capacity_tokens - len(member.held) * self.expected_tokens
        of_measured = member.free_tokens - len(member.since) * self.expected_tokens
        return min(of_capacity, of_measured)

    def _take_from(self, granted: Granted) -> None:
        member = self.members[granted.session]
        del member.held[granted.key]
        member.since.discard(granted.key)
