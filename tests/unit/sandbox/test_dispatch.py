"""The Dispatcher as a table of events and actions, and its invariants under any order of events."""

from __future__ import annotations

import doctest
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sandbox.client import dispatch
from sandbox.client.dispatch import Action, Cancel, Deliver, Dispatcher, Failed, Forget, Lost, Send
from tests.support.examples import examples

A, B = b"session a", b"session b"


def make(**hosts: int) -> Dispatcher:
    """Hosts of tier "x" with so many credits."""
    dispatcher = Dispatcher()
    for name, credits in hosts.items():
        assert dispatcher.host_joined(name, credits, ["x"]) == []
    return dispatcher


def test_the_example_in_the_docstring() -> None:
    assert doctest.testmod(dispatch) == (0, 4)


def test_calls_wait_for_credits_in_order() -> None:
    d = make(a=2)
    assert [d.submit(i, "x") for i in range(4)] == [[Send("a", 0)], [Send("a", 1)], [], []]
    assert d.answered("a", 1, lost=False) == [Deliver(1), Send("a", 2)]
    assert d.answered("a", 0, lost=False) == [Deliver(0), Send("a", 3)]
    assert d.pending == 2


def test_the_least_loaded_host_is_next() -> None:
    d = make(a=2, b=3)
    assert [d.submit(i, "x")[0] for i in range(3)] == [Send("b", 0), Send("a", 1), Send("b", 2)]


def test_a_call_goes_only_to_a_host_of_its_tier_and_does_not_hold_up_others() -> None:
    d = make(a=2)
    assert d.submit(0, "y") == []
    assert d.submit(1, "x") == [Send("a", 1)]
    assert d.unserved() == [(0, "y")]
    assert d.host_joined("b", 1, ["x", "y"]) == [Send("b", 0)]
    assert d.unserved() == []
    assert [d.submit(2, "y"), d.submit(3, "x")] == [[], [Send("a", 3)]]
    assert d.unserved() == [], "it waits for a credit, not for a host"


def test_a_call_for_which_no_host_came_fails() -> None:
    d = make(a=1)
    d.submit(0, "y")
    d.submit(1, "y", A)
    d.submit(2, "y", A)
    assert d.fail(0) == [Failed(0)]
    assert d.unserved() == [(1, "y")]
    assert d.fail(1) == [Failed(1)]
    assert d.unserved() == [(2, "y")]
    assert d.fail(2) == [Failed(2)]
    assert d.idle


def test_a_lost_call_is_retried_first_and_once() -> None:
    d = make(a=1)
    d.submit(0, "x")
    d.submit(1, "x")
    assert d.answered("a", 0, lost=True) == [Send("a", 0)]
    assert d.answered("a", 0, lost=True) == [Lost(0), Send("a", 1)]


def test_the_calls_of_a_dead_host_go_to_another_in_order() -> None:
    d = make(a=3)
    for i in range(5):
        d.submit(i, "x")
    assert d.host_left("a") == []
    assert d.host_joined("b", 4, ["x"]) == [Send("b", i) for i in range(4)]
    assert d.host_left("b") == [Lost(0), Lost(1), Lost(2)]
    assert d.host_joined("c", 9, ["x"]) == [Send("c", 3), Send("c", 4)]
    assert d.answered("b", 3, lost=False) == [], "a host that was given up has no say"


def test_cancelling() -> None:
    d = make(a=1)
    d.submit(0, "x")
    d.submit(1, "x")
    d.submit(2, "x")
    assert d.cancel(1) == []
    assert d.cancel(0) == [Cancel("a", 0)]
    assert d.cancel(0) == []
    assert d.answered("a", 0, lost=True) == [Send("a", 2)], "the answer of a cancelled call only frees its credit"


def test_many_cancelled_calls_leave_nothing_in_a_queue() -> None:
    d = make()
    for i in range(1000):
        d.submit(i, "x")
    for i in reversed(range(1000)):
        d.cancel(i)
    assert d.idle


def test_a_session_stays_on_its_host_and_waits_for_it() -> None:
    d = make(a=1, b=1)
    assert d.submit(0, "x", A) == [Send("a", 0)]
    assert d.answered("a", 0, lost=False) == [Deliver(0)]
    assert d.submit(1, "x") == [Send("a", 1)], "no host is kept free for a session"
    assert d.submit(2, "x", A) == [], "b has room, but the session is on a"
    assert d.submit(3, "x") == [Send("b", 3)], "and does not hold up what can run"
    assert d.submit(4, "x") == []
    assert d.answered("a", 1, lost=False) == [Deliver(1), Send("a", 2)]


def test_a_session_runs_one_cell_at_a_time() -> None:
    d = make(a=9)
    assert [d.submit(i, "x", A) for i in range(3)] == [[Send("a", 0)], [], []]
    assert d.submit(3, "x", B) == [Send("a", 3)]
    assert d.cancel(0) == [Cancel("a", 0)]
    assert d.cancel(1) == []
    assert d.answered("a", 0, lost=False) == [Send("a", 2)], "only when the host is done with the cancelled cell"


def test_sessions_are_spread_over_idle_hosts() -> None:
    d = make(a=2, b=4)
    hosts = []
    for i in range(6):
        [action] = d.submit(i, "x", b"%d" % i)
        assert isinstance(action, Send)
        hosts.append(action.host)
        d.answered(action.host, i, lost=False)
    assert Counter(hosts) == {"a": 2, "b": 4}


def test_when_its_host_leaves_a_session_loses_its_cell_and_starts_elsewhere() -> None:
    d = make(a=2)
    d.submit(0, "x", A)
    d.submit(1, "x", A)
    d.submit(2, "x")
    assert d.host_left("a") == [Lost(0)]
    assert d.host_joined("b", 2, ["x"]) == [Send("b", 1), Send("b", 2)]
    assert d.answered("b", 1, lost=True) == [Deliver(1)], "a lost cell is not retried: the session rebuilds"


def test_a_cell_that_waited_for_a_dead_host_goes_to_another() -> None:
    d = make(a=1)
    d.submit(0, "x", A)
    d.answered("a", 0, lost=False)
    d.submit(1, "x")
    assert d.submit(2, "x", A) == []
    assert d.host_joined("b", 1, ["x"]) == []
    assert d.host_left("a") == [Send("b", 1)]
    assert d.answered("b", 1, lost=False) == [Deliver(1), Send("b", 2)]


def test_the_end_of_a_session() -> None:
    d = make(a=1)
    assert d.end_session(A) == []
    for i in range(2):
        d.submit(i, "x", A)
    assert d.submit(2, "x", B) == []
    assert d.end_session(A) == [Lost(0), Cancel("a", 0), Lost(1), Forget("a", A)]
    assert d.end_session(B) == [Lost(2)], "no host has heard of it"
    assert d.answered("a", 0, lost=False) == []
    assert d.idle


def test_without_any_host_to_come_all_calls_fail() -> None:
    d = make(a=1)
    d.submit(0, "x")
    d.submit(1, "x", A)
    d.submit(2, "x", A)
    assert d.host_left("a") == []
    assert d.fail_all() == [Failed(0), Failed(1), Failed(2)]
    assert d.idle


TIERS = ("x", "y")
SESSIONS = (None, A, B)
EVENTS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 11), st.booleans()), max_size=150)


class World:
    """Hosts that do what the actions say, and a record of what each call was told."""

    def __init__(self) -> None:
        self.d = Dispatcher()
        self.credits: dict[str, int] = {}
        self.tiers: dict[str, tuple[str, ...]] = {}
        self.held: dict[str, list[int]] = {}
        self.answers: Counter[int] = Counter()
        self.cancelled: set[int] = set()
        self.sent: Counter[int] = Counter()
        self.calls: list[tuple[str, bytes | None]] = []
        self.last_cell: dict[bytes, int] = {}
        self.home: dict[bytes, str] = {}
        self.forgotten: set[int] = set()
        self.hosts = 0

    def apply(self, actions: list[Action]) -> None:
        sent_now: list[int] = []
        for action in actions:
            match action:
                case Send(host, call):
                    self._sent(host, call)
                    sent_now.append(call)
                case Cancel(host, call):
                    assert call in self.held[host]
                case Forget(host, session):
                    assert self.home.pop(session) == host
                    self.forgotten |= {call for call in self.held[host] if self.calls[call][1] == session}
                case Deliver(call) | Lost(call) | Failed(call):
                    self.answers[call] += 1
        assert sent_now == sorted(sent_now), "the earliest first"

    def _sent(self, host: str, call: int) -> None:
        tier, session = self.calls[call]
        assert call not in self.cancelled
        assert not self.answers[call]
        assert tier in self.tiers[host]
        if session is not None:
            held = [other for calls in self.held.values() for other in calls if self.calls[other][1] == session]
            held = [other for other in held if other not in self.forgotten]  # their session was another of that name
            assert held == [], "one cell at a time"
            assert self.home.setdefault(session, host) == host, "on one host"
            assert self.last_cell.get(session, -1) < call, "in order, and never retried"
            self.last_cell[session] = call
        self.held[host].append(call)
        self.sent[call] += 1
        assert len(self.held[host]) <= self.credits[host]

    def submit(self, tier: str, session: bytes | None) -> None:
        self.calls.append((tier, session))
        self.apply(self.d.submit(len(self.calls) - 1, tier, session))

    def cancel(self, call: int) -> None:
        if not self.answers[call]:
            self.cancelled.add(call)
        self.apply(self.d.cancel(call))

    def join(self, credits: int, tiers: tuple[str, ...]) -> None:
        name = f"h{self.hosts}"
        self.hosts += 1
        self.credits[name], self.tiers[name], self.held[name] = credits, tiers, []
        self.apply(self.d.host_joined(name, credits, tiers))

    def leave(self, name: str) -> None:
        del self.credits[name], self.tiers[name], self.held[name]
        self.home = {session: host for session, host in self.home.items() if host != name}
        self.apply(self.d.host_left(name))

    def answer(self, name: str, index: int, *, lost: bool) -> None:
        call = self.held[name].pop(index % len(self.held[name]))
        self.apply(self.d.answered(name, call, lost=lost))

    def idle_hosts_are_idle_for_a_reason(self) -> None:
        """Nothing waits that could run: a stateless call waits only if no host of its tier has room."""
        held = {call for calls in self.held.values() for call in calls}
        for call, (tier, session) in enumerate(self.calls):
            if session is None and not self.answers[call] and call not in self.cancelled | held:
                able = [name for name, tiers in self.tiers.items() if tier in tiers]
                assert all(len(self.held[name]) == self.credits[name] for name in able)


@examples(400)
@given(EVENTS)
def test_each_call_is_answered_once_and_nothing_leaks(events: list[tuple[int, int, bool]]) -> None:
    world = World()
    for kind, pick, flag in events:
        names = sorted(world.credits)
        if kind <= 1:
            session = SESSIONS[pick % 3]
            world.submit(TIERS[flag] if session is None else TIERS[session == B], session)
        elif kind == 2 and world.calls:
            world.cancel(pick % len(world.calls))
        elif kind == 3:
            world.join(1 + pick % 3, TIERS if flag else TIERS[:1])
        elif kind == 4 and names:
            world.leave(names[pick % len(names)])
        elif kind == 5 and names and world.held[names[pick % len(names)]]:
            world.answer(names[pick % len(names)], pick // 2, lost=flag)
        elif kind == 6 and pick < 2:
            world.apply(world.d.end_session(SESSIONS[1 + pick]))  # type: ignore[arg-type]
        elif kind == 6 and (waiting := world.d.unserved()):
            world.apply(world.d.fail(waiting[pick % len(waiting)][0]))
        world.idle_hosts_are_idle_for_a_reason()
    world.join(3, TIERS)
    while any(world.held.values()):
        world.answer(next(name for name, calls in world.held.items() if calls), 0, lost=False)
    for session in (A, B):
        world.apply(world.d.end_session(session))
    assert all(world.answers[call] == (call not in world.cancelled) for call in range(len(world.calls)))
    assert all(count <= 2 for count in world.sent.values())
    assert world.d.pending == 0
    assert world.d.idle
    assert not world.home
