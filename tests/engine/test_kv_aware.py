"""The KV-aware balancer: each rule as a table, its invariants under any sequence of events."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.kv_aware import KvAware
from engine.ports import KvSample

BLOCK = 32


def balancer(replicas=1, blocks=100, max_tokens=320, **options):
    found = KvAware(max_tokens, **options)
    for index in range(replicas):
        found.replica_up(index, blocks, BLOCK)
    return found


def arrive(policy, *keys, tokens=32, group=None, now=0.0):
    for key in keys:
        policy.arrive(key, key if group is None else group, tokens, now)


def decided(policy, now=0.0):
    places = policy.decide(now)
    policy.check()
    return [(place.key, place.replica, place.rule) for place in places]


def free(blocks, running=0):
    return KvSample(free_blocks=blocks, running=running, waiting=0, preempted=0)


def test_an_empty_replica_takes_the_first_in_line_whatever_it_needs():
    policy = balancer(blocks=1)
    arrive(policy, 1, 2)
    assert decided(policy) == [(1, 0, "empty")]
    policy.leave(1, 320, True)
    assert decided(policy) == [(2, 0, "empty")]


def test_admission_stops_where_the_expected_sizes_fill_the_replica():
    policy = balancer(blocks=100, fill=0.85, max_tokens=320)  # 10 blocks each, 85 to give
    arrive(policy, *range(10))
    assert [key for key, _, _ in decided(policy)] == list(range(8))
    assert policy.waiting() == 2
    assert policy.reserved_blocks() == 80


def test_the_expected_size_is_the_mean_of_the_longer_ones_once_some_have_finished():
    policy = balancer(blocks=1000, max_tokens=320)
    assert policy.expected_tokens(10) == 320
    for key, tokens in enumerate([40, 40, 40, 40, 80, 80, 80, 120]):
        arrive(policy, key)
        decided(policy)
        assert policy.expected_tokens(10) == 320, "too few to judge"
        policy.leave(key, tokens, True)
    assert policy.expected_tokens(10) == 65
    assert policy.expected_tokens(40) == 90, "those of 40 tokens are over"
    assert policy.expected_tokens(119) == 120
    assert policy.expected_tokens(120) == 320, "nothing is known of longer ones: the bound"
    assert policy.expected_tokens(400) == 400


def test_the_history_forgets_the_oldest_sizes():
    policy = balancer(blocks=1000, history=8)
    for key in range(16):
        arrive(policy, key)
        decided(policy)
        policy.leave(key, 100 if key < 8 else 200, True)
    assert policy.expected_tokens(10) == 200


def test_what_waited_and_left_teaches_nothing():
    policy = KvAware(320)
    for key in range(8):
        arrive(policy, key)
        policy.leave(key, 40, True)
    assert policy.expected_tokens(10) == 320


def test_live_free_blocks_are_a_hard_check_and_placements_count_until_they_are_seen():
    policy = balancer(blocks=1000)
    arrive(policy, 0)
    decided(policy)
    policy.sample(0, free(5, running=1), 0.0)
    arrive(policy, 1, 2, 3)  # two blocks each now, one for each that runs
    assert [key for key, _, _ in decided(policy)] == [1, 2]
    policy.sample(0, free(5, running=3), 0.0)
    assert [key for key, _, _ in decided(policy)] == [3]


def test_more_headroom_wins_and_a_resident_group_prompt_counts_as_its_blocks():
    policy = balancer(replicas=2, blocks=1000)
    arrive(policy, 1, group=1, tokens=96)
    arrive(policy, 2, group=2, tokens=96)
    assert decided(policy) == [(1, 0, "empty"), (2, 1, "empty")]
    arrive(policy, 3, group=2, tokens=96)
    assert decided(policy) == [(3, 1, "headroom")], "its prompt is there"
    arrive(policy, 4, group=3, tokens=96)
    assert decided(policy) == [(4, 0, "headroom")], "less is reserved there"


def test_ready_goes_home_before_everybody_else():
    policy = balancer(replicas=2)
    arrive(policy, 1, 2)
    decided(policy)
    policy.turn_done(2, 64, 1.0)
    arrive(policy, 3)
    arrive(policy, 2, tokens=70, now=2.0)
    assert decided(policy, 2.0)[0] == (2, 1, "home")


def test_the_first_in_line_is_not_overtaken_by_one_that_would_fit():
    policy = balancer(blocks=20, max_tokens=10)
    arrive(policy, 1, tokens=320)
    decided(policy)
    arrive(policy, 2, tokens=640)
    arrive(policy, 3, tokens=32)
    policy.sample(0, free(20), 0.0)
    assert decided(policy) == []
    policy.leave(1, 320, True)
    assert decided(policy)[0][0] == 2


def test_a_fresh_one_does_not_overtake_a_parked_one():
    policy = balancer(blocks=30, max_tokens=10, hold_s=1.0)
    arrive(policy, 1, tokens=640)
    decided(policy)
    policy.turn_done(1, 640, now=0.0)
    arrive(policy, 2, tokens=320)
    assert decided(policy, 2.0) == [(2, 0, "empty")]
    arrive(policy, 1, tokens=650, now=3.0)
    arrive(policy, 3, tokens=32)
    policy.sample(0, free(30), 0.0)
    assert decided(policy, 3.0) == []


def test_a_tool_wait_keeps_its_blocks_until_hold_s_then_it_is_parked():
    policy = balancer(blocks=20, hold_s=25.0)  # one trajectory fills it
    arrive(policy, 1)
    decided(policy)
    policy.turn_done(1, 64, now=0.0)
    arrive(policy, 2)
    assert decided(policy, 25.0) == []
    assert decided(policy, 25.1) == [(2, 0, "empty")]
    arrive(policy, 3)
    arrive(policy, 1, tokens=70, now=30.0)
    assert decided(policy, 30.0) == []
    policy.leave(2, 100, True)
    assert decided(policy, 30.0) == [(1, 0, "empty")], "parked goes before fresh"


def test_one_that_comes_back_late_is_parked_even_when_nobody_wanted_its_blocks():
    policy = balancer(hold_s=25.0)
    arrive(policy, 1)
    decided(policy)
    policy.turn_done(1, 64, now=0.0)
    arrive(policy, 1, tokens=70, now=26.0)
    assert decided(policy, 26.0) == [(1, 0, "empty")]


def test_what_ran_or_waited_on_a_dead_replica_goes_elsewhere():
    policy = balancer(replicas=2)
    arrive(policy, 1, 2, 3, 4)
    places = {key: replica for key, replica, _ in decided(policy)}
    running, ready = [key for key in places if places[key] == 0]
    policy.turn_done(ready, 50, 0.0)
    arrive(policy, ready, tokens=60)
    policy.replica_down(0)
    policy.check()
    arrive(policy, running, tokens=40)
    assert sorted(decided(policy)) == sorted([(running, 1, "headroom"), (ready, 1, "headroom")])
    for key in places:
        policy.leave(key, 70, True)
    assert policy.reserved_blocks() == 0


def test_a_turn_may_end_in_the_moment_its_replica_dies():
    policy = balancer()
    arrive(policy, 1)
    decided(policy)
    policy.replica_down(0)
    policy.turn_done(1, 50, 0.0)
    arrive(policy, 1, tokens=60)
    assert decided(policy) == []
    policy.replica_up(0, 100, BLOCK)
    assert decided(policy) == [(1, 0, "empty")]


def test_without_a_replica_everybody_waits():
    policy = KvAware(320)
    arrive(policy, 1, 2)
    assert decided(policy) == []
    assert policy.waiting() == 2


def test_events_that_cannot_be_are_refused():
    policy = balancer()
    with pytest.raises(ValueError, match="replica 0 is up already"):
        policy.replica_up(0, 1, 1)
    arrive(policy, 1)
    with pytest.raises(ValueError, match="trajectory 1 arrives while fresh"):
        arrive(policy, 1)
    with pytest.raises(ValueError, match="trajectory 1 ends a turn while fresh"):
        policy.turn_done(1, 2, 0.0)
    with pytest.raises(ValueError, match=r"fill must be in \(0, 1\], got 1.5"):
        KvAware(10, fill=1.5)


def test_leave_is_idempotent_and_a_late_sample_of_a_dead_replica_is_ignored():
    policy = balancer()
    arrive(policy, 1)
    decided(policy)
    policy.leave(1, 10, True)
    policy.leave(1, 10, True)
    policy.replica_down(0)
    policy.sample(0, free(3), 0.0)
    policy.check()


class Machine(RuleBasedStateMachine):
    """The node's side of the contract, at random: replicas come and go, trajectories leave in every state."""

    def __init__(self):
        super().__init__()
        self.now, self.key = 0.0, 0
        self.policy = KvAware(max_tokens=200, hold_s=20.0, history=16)
        self.up = {}
        self.state = {}  # key -> "waiting" | "running" | "tool"
        self.order = []  # fresh keys in the order of arrival

    @rule(blocks=st.integers(1, 40), replica=st.integers(0, 2))
    def replica_comes(self, replica, blocks):
        if replica not in self.up:
            self.up[replica] = blocks
            self.policy.replica_up(replica, blocks, 8)
            self.decide()

    @rule(replica=st.integers(0, 2))
    def replica_goes(self, replica):
        if self.up.pop(replica, None) is None:
            return
        self.policy.replica_down(replica)
        for key, state in list(self.state.items()):
            if state == ("running", replica):
                self.policy.arrive(key, key % 3, 30, self.now)
                self.state[key] = "waiting"
        self.decide()

    @rule(replica=st.integers(0, 2), share=st.floats(0, 1), running=st.integers(0, 5))
    def step(self, replica, share, running):
        self.policy.sample(replica, free(int(share * self.up.get(replica, 0)), running), 0.0)
        self.decide()

    @rule(count=st.integers(1, 4), tokens=st.integers(1, 150))
    def new(self, count, tokens):
        for _ in range(count):
            self.key += 1
            self.policy.arrive(self.key, self.key % 3, tokens, self.now)
            self.state[self.key] = "waiting"
            self.order.append(self.key)
        self.decide()

    @rule(pick=st.integers(0, 50), tokens=st.integers(1, 250))
    def turn_ends(self, pick, tokens):
        if keys := [key for key, state in self.state.items() if state[0] == "running"]:
            key = keys[pick % len(keys)]
            self.policy.turn_done(key, tokens, self.now)
            self.state[key] = "tool"
            self.decide()

    @rule(pick=st.integers(0, 50), tokens=st.integers(1, 250))
    def tool_answers(self, pick, tokens):
        if keys := [key for key, state in self.state.items() if state == "tool"]:
            key = keys[pick % len(keys)]
            self.policy.arrive(key, key % 3, tokens, self.now)
            self.state[key] = "waiting"
            self.decide()

    @rule(pick=st.integers(0, 50), tokens=st.integers(1, 250))
    def leaves(self, pick, tokens):
        if self.state:
            key = list(self.state)[pick % len(self.state)]
            del self.state[key]
            if key in self.order:
                self.order.remove(key)
            self.policy.leave(key, tokens, True)
            self.decide()

    @rule(seconds=st.floats(0.1, 15))
    def time_passes(self, seconds):
        self.now += seconds

    def decide(self):
        for place in self.policy.decide(self.now):
            assert self.state[place.key] == "waiting", place
            assert place.replica in self.up, place
            self.state[place.key] = ("running", place.replica)
            if place.key in self.order:
                assert self.order.pop(0) == place.key, "a fresh one was overtaken"
        waiting = [key for key, state in self.state.items() if state == "waiting"]
        busy = {state[1] for state in self.state.values() if state[0] == "running"}
        idle = [index for index in self.up if index not in busy and not self.policy._replicas[index].active]
        assert not (waiting and idle), f"{waiting} wait while {idle} have nothing to do"
        assert self.policy.waiting() == len(waiting)

    @invariant()
    def holds(self):
        self.policy.check()

    def teardown(self):
        for key in list(self.state):
            self.policy.leave(key, 10, True)
        self.policy.check()
        assert self.policy.reserved_blocks() == self.policy.waiting() == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_was_cancelled_teaches_nothing():
    policy = balancer(blocks=1000, max_tokens=320)
    for key in range(8):
        arrive(policy, key)
        decided(policy)
        policy.leave(key, 40, False)
    assert policy.expected_tokens(10) == 320


def test_nothing_new_goes_to_a_draining_replica():
    policy = balancer(replicas=2, blocks=1000)
    policy.replica_drain(0)
    arrive(policy, 1, 2)
    assert decided(policy) == [(1, 1, "empty"), (2, 1, "headroom")]
