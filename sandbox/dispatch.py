"""Which host gets which call: a pure state machine (events in, actions out; no await, clock or socket).

Invariants
- Every submitted call is answered exactly once: by a result, by Lost after one retry, or by Failed; a cancelled call
  is answered never.
- A host holds at most `credits` calls. Calls start in the order of submission; a retried call goes to the front.
- When all calls are answered or cancelled, nothing is left in here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Send:
    """Give the call to the host."""

    host: str
    call: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell the host to end the call; its result, if one still comes, is ignored."""

    host: str
    call: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """The result in hand is the call's answer."""

    call: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Answer the call as lost: it was tried twice and each time its slot or host died."""

    call: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Answer the call with an error: no host will come."""

    call: int


Action = Send | Cancel | Deliver | Lost | Failed


@dataclass(slots=True)
class _Host:
    credits: int
    held: set[int] = field(default_factory=set)


class Dispatcher:
    """
    >>> d = Dispatcher()
    >>> d.submit(1), d.host_joined("a", credits=1), d.submit(2)
    ([], [Send(host='a', call=1)], [])
    >>> d.host_left("a"), d.host_joined("b", credits=2)
    ([], [Send(host='b', call=1), Send(host='b', call=2)])
    >>> d.answered("b", 1, lost=False), d.answered("b", 2, lost=True)
    ([Deliver(call=1)], [Send(host='b', call=2)])
    """

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}
        self._queue: OrderedDict[int, None] = OrderedDict()  # in the order of their start
        self._running: dict[int, str] = {}
        self._retried: set[int] = set()

    @property
    def pending(self) -> int:
        return len(self._queue) + len(self._running)

    def submit(self, call: int) -> list[Action]:
        assert call not in self._queue
        assert call not in self._running
        self._queue[call] = None
        return self._fill()

    def cancel(self, call: int) -> list[Action]:
        """Forget the call. One that a host already holds keeps its credit until the host answers."""
        self._retried.discard(call)
        self._queue.pop(call, None)
        host = self._running.pop(call, None)
        return [] if host is None else [Cancel(host, call)]

    def host_joined(self, host: str, credits: int) -> list[Action]:
        assert host not in self._hosts
        assert credits > 0
        self._hosts[host] = _Host(credits)
        return self._fill()

    def host_left(self, host: str) -> list[Action]:
        """The host died or was given up: each call that it held is tried once more, then answered as lost."""
        running = [call for call in self._hosts.pop(host).held if self._running.pop(call, None) is not None]
        actions = [action for call in sorted(running, reverse=True) for action in self._retry(call)]
        return actions[::-1] + self._fill()

    def answered(self, host: str, call: int, *, lost: bool) -> list[Action]:
        """A result came: of a cancelled call it only frees the credit, of a host that was given up it is ignored."""
        state = self._hosts.get(host)
        if state is None or call not in state.held:
            return []
        state.held.remove(call)
        actions: list[Action] = []
        if self._running.pop(call, None) is not None:
            actions = self._retry(call) if lost else self._final(Deliver(call))
        return actions + self._fill()

    def fail_all(self) -> list[Action]:
        """No host will ever come: fail every call."""
        calls = [*self._running, *self._queue]
        for state in (self._running, self._queue, self._retried):
            state.clear()
        return [Failed(call) for call in calls]

    def _final(self, answer: Deliver | Lost) -> list[Action]:
        self._retried.discard(answer.call)
        return [answer]

    def _retry(self, call: int) -> list[Action]:
        if call in self._retried:
            return self._final(Lost(call))
        self._retried.add(call)
        self._queue[call] = None
        self._queue.move_to_end(call, last=False)
        return []

    def _fill(self) -> list[Action]:
        """Hand queued calls to the least loaded hosts while credits last."""
        actions: list[Action] = []
        while self._queue:
            free = [(host.credits - len(host.held), name) for name, host in self._hosts.items()]
            room, name = max(free, default=(0, ""))
            if room <= 0:
                break
            call, _ = self._queue.popitem(last=False)
            self._hosts[name].held.add(call)
            self._running[call] = name
            actions.append(Send(name, call))
        return actions
