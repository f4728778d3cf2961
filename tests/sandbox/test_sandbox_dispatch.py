"""The Dispatcher as a table of events and actions, and its invariants under any order of events."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sandbox.dispatch import Action, Cancel, Deliver, Dispatcher, Failed, Lost, Send


def make(**hosts: int) -> Dispatcher:
    dispatcher = Dispatcher()
    for name, credits in hosts.items():
        assert dispatcher.host_joined(name, credits) == []
    return dispatcher


def test_calls_wait_for_credits_in_order() -> None:
    d = make(a=2)
    assert [d.submit(i) for i in range(4)] == [[Send("a", 0)], [Send("a", 1)], [], []]
    assert d.answered("a", 1, lost=False) == [Deliver(1), Send("a", 2)]
    assert d.answered("a", 0, lost=False) == [Deliver(0), Send("a", 3)]
    assert d.pending == 2


def test_the_least_loaded_host_is_next() -> None:
    d = make(a=2, b=3)
    assert [d.submit(i)[0] for i in range(3)] == [Send("b", 0), Send("b", 1), Send("a", 2)]


def test_a_lost_call_is_retried_first_and_once() -> None:
    d = make(a=1)
    d.submit(0)
    d.submit(1)
    assert d.answered("a", 0, lost=True) == [Send("a", 0)]
    assert d.answered("a", 0, lost=True) == [Lost(0), Send("a", 1)]


def test_the_calls_of_a_dead_host_go_to_another_in_order() -> None:
    d = make(a=3)
    for i in range(5):
        d.submit(i)
    assert d.host_left("a") == []
    assert d.host_joined("b", 4) == [Send("b", i) for i in range(4)]
    assert d.host_left("b") == [Lost(0), Lost(1), Lost(2)]
    assert d.host_joined("c", 9) == [Send("c", 3), Send("c", 4)]
    assert d.answered("b", 3, lost=False) == [], "a host that was given up has no say"


def test_cancelling() -> None:
    d = make(a=1)
    d.submit(0)
    d.submit(1)
    d.submit(2)
    assert d.cancel(1) == []
    assert d.cancel(0) == [Cancel("a", 0)]
    assert d.cancel(0) == []
    assert d.answered("a", 0, lost=True) == [Send("a", 2)], "the answer of a cancelled call only frees its credit"


def test_without_any_host_to_come_all_calls_fail() -> None:
    d = make(a=1)
    d.submit(0)
    d.submit(1)
    assert d.host_left("a") == []
    assert d.fail_all() == [Failed(0), Failed(1)]
    assert d.pending == 0


EVENTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.booleans()), max_size=120)


@given(EVENTS)
def test_each_call_is_answered_once_and_nothing_leaks(events: list[tuple[int, int, bool]]) -> None:
    d = Dispatcher()
    credits: dict[str, int] = {}
    held: dict[str, set[int]] = {}
    answers: Counter[int] = Counter()
    cancelled: set[int] = set()
    sent: Counter[int] = Counter()
    calls = hosts = 0

    def apply(actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(host, call):
                    assert call not in cancelled
                    held[host].add(call)
                    sent[call] += 1
                    assert len(held[host]) <= credits[host]
                case Cancel(host, call):
                    assert call in held[host]
                case Deliver(call) | Lost(call) | Failed(call):
                    answers[call] += 1

    for kind, pick, flag in events:
        names = sorted(credits)
        if kind <= 1:
            apply(d.submit(calls))
            calls += 1
        elif kind == 2 and calls:
            call = pick % calls
            if not answers[call]:
                cancelled.add(call)
            apply(d.cancel(call))
        elif kind == 3 and hosts < 40:
            credits[f"h{hosts}"], held[f"h{hosts}"] = 1 + pick % 3, set()
            apply(d.host_joined(f"h{hosts}", credits[f"h{hosts}"]))
            hosts += 1
        elif kind == 4 and names:
            name = names[pick % len(names)]
            del credits[name], held[name]
            apply(d.host_left(name))
        elif kind == 5 and names and held[names[pick % len(names)]]:
            name = names[pick % len(names)]
            call = min(held[name])
            held[name].discard(call)
            apply(d.answered(name, call, lost=flag))

    credits["end"], held["end"] = 3, set()
    apply(d.host_joined("end", 3))
    while any(held.values()):
        name = next(name for name in held if held[name])
        apply(d.answered(name, held[name].pop(), lost=False))
    assert d.pending == 0
    assert all(answers[call] == (call not in cancelled) for call in range(calls))
    assert all(count <= 2 for count in sent.values())
    assert not d._retried
