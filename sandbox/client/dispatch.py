"""Decides which host gets which call: a pure state machine (events in, actions out; no await, clock or socket).

Invariants
- Every submitted call is answered exactly once: by a result, by Lost, or by Failed. A cancelled call is never answered.
- A host holds at most `credits` calls, all of tiers that it serves. What can run starts in the order of submission, so
  a retried call comes first; a call that must wait (for its tier or its session's host) does not delay later ones.
- A stateless call whose slot or host died is tried once more, then Lost. A cell of a session is never retried.
- A session's cells go to the one host that holds it, one at a time, in order. When that host leaves, the cell that it
  was running is Lost at once, and the session may start elsewhere.
- When all calls are answered or cancelled and all sessions ended, only the hosts remain in here.
- The cost of an event grows with the number of hosts and tiers, not of waiting calls (except for a logarithm).

Calls are numbers that grow with each submission. Tiers are names; a session's cells are all of one tier.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Send:
    """Give the call to the host."""

    host: str
    call: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell the host to end the call; if a result still comes, it is ignored."""

    host: str
    call: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Answer the call with the result at hand."""

    call: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Answer the call as lost: its slots or hosts died."""

    call: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Answer the call with an error: no host will come."""

    call: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Tell the host that the session has ended."""

    host: str
    session: bytes


Action = Send | Cancel | Deliver | Lost | Failed | Forget


class _Queue:
    """Calls in order, the earliest first; any of them can be removed."""

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, call: int) -> None:
        self._members.add(call)
        heapq.heappush(self._heap, call)

    def head(self) -> int:
        while self._heap[0] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0]

    def remove(self, call: int) -> None:
        self._members.remove(call)
        if len(self._heap) > 2 * len(self._members):  # removed calls are dropped in bulk: O(1) each
            self._heap = sorted(self._members)

    def calls(self) -> list[int]:
        return sorted(self._members)


@dataclass(slots=True)
class _Job:
    """An unanswered call; `host` holds it, or None while it waits."""

    tier: str
    session: bytes | None
    host: str | None = None
    retried: bool = False


@dataclass(slots=True)
class _Session:
    """A session. `open` is its only cell that is queued or held by `host`, cancelled or not, until the host answers."""

    host: str | None = None
    open: int | None = None
    later: dict[int, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Host:
    credits: int
    tiers: frozenset[str]
    held: dict[int, bytes | None] = field(default_factory=dict)  # call -> session
    sessions: set[bytes] = field(default_factory=set)
    queue: _Queue = field(default_factory=_Queue)  # cells of its sessions that wait for a credit

    @property
    def room(self) -> int:
        return self.credits - len(self.held)


class Dispatcher:
    """Turns events into actions.

    >>> d = Dispatcher()
    >>> d.submit(1, "bare"), d.host_joined("a", 1, ["bare"]), d.submit(2, "math"), d.submit(3, "bare")
    ([], [Send(host='a', call=1)], [], [])
    >>> d.host_left("a"), d.host_joined("b", 2, ["bare", "math"])
    ([], [Send(host='b', call=1), Send(host='b', call=2)])
    >>> d.answered("b", 1, lost=False), d.answered("b", 2, lost=True)
    ([Deliver(call=1), Send(host='b', call=3)], [Send(host='b', call=2)])
    """

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}
        self._jobs: dict[int, _Job] = {}
        self._sessions: dict[bytes, _Session] = {}
        self._queues: defaultdict[str, _Queue] = defaultdict(_Queue)  # tier -> calls that any of its hosts may run
        self._latest = -1

    @property
    def idle(self) -> bool:
        """Whether only the hosts are in here: no call, and no session."""
        hosts = self._hosts.values()
        at_work = any(host.held or host.sessions or host.queue for host in hosts)
        return not (at_work or self._jobs or self._sessions or any(self._queues.values()))

    @property
    def pending(self) -> int:
        return len(self._jobs)

    def submit(self, call: int, tier: str, session: bytes | None = None) -> list[Action]:
        assert call > self._latest
        self._latest = call
        self._jobs[call] = _Job(tier, session)
        if session is None:
            self._queues[tier].push(call)
        else:
            self._sessions.setdefault(session, _Session()).later[call] = None
            self._open_next(session)
        return self._fill()

    def cancel(self, call: int) -> list[Action]:
        """Forgets the call. One that a host already holds keeps its credit until the host answers."""
        job = self._jobs.pop(call, None)
        if job is None:
            return []
        if job.host is not None:
            return [Cancel(job.host, call)]
        self._unqueue(call, job)
        return self._fill()

    def fail(self, call: int) -> list[Action]:
        """Fails a call that waits."""
        job = self._jobs.pop(call)
        assert job.host is None
        self._unqueue(call, job)
        return [Failed(call), *self._fill()]

    def fail_all(self) -> list[Action]:
        """Fails every call, since no host will ever come."""
        calls = sorted(self._jobs)
        for state in (self._jobs, self._queues, self._sessions):
            state.clear()
        for host in self._hosts.values():
            host.sessions.clear()
            host.queue = _Queue()
        return [Failed(call) for call in calls]

    def unserved(self) -> list[tuple[int, str]]:
        """Returns the calls that wait for a tier which no present host serves, with that tier."""
        served: set[str] = set().union(*(host.tiers for host in self._hosts.values()))
        missing = [tier for tier, queue in self._queues.items() if queue and tier not in served]
        return [(call, tier) for tier in missing for call in self._queues[tier].calls()]

    def end_session(self, session: bytes) -> list[Action]:
        """Forgets the session and tells its host; its unanswered cells are Lost."""
        state = self._sessions.get(session)
        if state is None:
            return []
        actions: list[Action] = []
        for call in ([] if state.open is None else [state.open]) + list(state.later):
            if (job := self._jobs.get(call)) is not None:
                actions += [Lost(call), *([] if job.host is None else [Cancel(job.host, call)])]
                if job.host is None and call == state.open:
                    self._queue_of(state, job).remove(call)
                del self._jobs[call]
        del self._sessions[session]
        if state.host is not None:
            self._hosts[state.host].sessions.remove(session)
            actions.append(Forget(state.host, session))
        return actions

    def host_joined(self, host: str, credits: int, tiers: Iterable[str]) -> list[Action]:
        assert host not in self._hosts
        assert credits > 0
        self._hosts[host] = _Host(credits, frozenset(tiers))
        return self._fill()

    def host_left(self, host: str) -> list[Action]:
        """Handles a host that died or was given up: its calls are retried or lost, its sessions have no host."""
        gone = self._hosts.pop(host)
        for session in gone.sessions:
            self._sessions[session].host = None
        for call in gone.queue.calls():
            self._queues[self._jobs[call].tier].push(call)
        actions: list[Action] = []
        for call, owner in sorted(gone.held.items()):
            if call in self._jobs:
                actions += self._retry(call) if owner is None else self._final(Lost(call))
            self._release(call, owner)
        for session in gone.sessions:
            self._open_next(session)
        return actions + self._fill()

    def answered(self, host: str, call: int, *, lost: bool) -> list[Action]:
        """Handles a result. It frees the credit of a cancelled call, and is ignored from a host that was given up."""
        state = self._hosts.get(host)
        if state is None or call not in state.held:
            return []
        session = state.held.pop(call)
        actions: list[Action] = []
        if call in self._jobs:
            actions = self._retry(call) if lost and session is None else self._final(Deliver(call))
        self._release(call, session)
        return actions + self._fill()

    def _final(self, answer: Deliver | Lost) -> list[Action]:
        del self._jobs[answer.call]
        return [answer]

    def _retry(self, call: int) -> list[Action]:
        job = self._jobs[call]
        if job.retried:
            return self._final(Lost(call))
        job.retried, job.host = True, None
        self._queues[job.tier].push(call)
        return []

    def _release(self, call: int, session: bytes | None) -> None:
        """Opens the next cell of a session, since the host is done with this one."""
        state = self._sessions.get(session) if session is not None else None
        if session is not None and state is not None and state.open == call:
            state.open = None
            self._open_next(session)

    def _open_next(self, session: bytes) -> None:
        """Queues the session's next cell if none is open; forgets a session that has neither cells nor a host."""
        state = self._sessions.get(session)
        if state is None or state.open is not None:
            return
        if state.later:
            call = next(iter(state.later))
            del state.later[call]
            state.open = call
            self._queue_of(state, self._jobs[call]).push(call)
        elif state.host is None:
            del self._sessions[session]

    def _queue_of(self, state: _Session, job: _Job) -> _Queue:
        return self._queues[job.tier] if state.host is None else self._hosts[state.host].queue

    def _unqueue(self, call: int, job: _Job) -> None:
        if job.session is None:
            self._queues[job.tier].remove(call)
            return
        state = self._sessions[job.session]
        if call == state.open:
            self._queue_of(state, job).remove(call)
            self._release(call, job.session)
        else:
            del state.later[call]

    def _fill(self) -> list[Action]:
        """Hands out the earliest call that can run, as long as there is one, to the least loaded host for it."""
        actions: list[Action] = []
        while True:
            free = {name: host for name, host in self._hosts.items() if host.room > 0}
            heads = [(host.queue.head(), host.queue, [name]) for name, host in free.items() if host.queue]
            for tier, queue in self._queues.items() if free else ():
                if queue and (able := [name for name, host in free.items() if tier in host.tiers]):
                    heads.append((queue.head(), queue, able))
            if not heads:
                return actions
            call, queue, able = min(heads)
            queue.remove(call)
            job = self._jobs[call]
            job.host = name = min(able, key=lambda name: self._load(name, job.session))
            self._hosts[name].held[call] = job.session
            if job.session is not None:
                self._sessions[job.session].host = name
                self._hosts[name].sessions.add(job.session)
            actions.append(Send(name, call))

    def _load(self, name: str, session: bytes | None) -> tuple[float, int, str]:
        """Ranks hosts, the better ones first: for a new session by sessions per credit, then for all by their room."""
        host = self._hosts[name]
        return (0.0 if session is None else len(host.sessions) / host.credits), -host.room, name
