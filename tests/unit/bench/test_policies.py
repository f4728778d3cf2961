"""The rival policies: where each puts what, and that its books stay right."""

import pytest

from bench.benches.streaming.lockstep import Lockstep
from bench.placement.policies import POLICIES, Capped, Setting, StaticSplit, ThunderPolled, TokenBudget
from bench.placement.workload import generate
from engine import contracts
from engine.balancing.round_robin import RoundRobin
from engine.replica.port import KvSample

BLOCK = 10
ALL = [
    StaticSplit,
    Lockstep,
    RoundRobin,
    lambda: Capped(3),
    lambda: TokenBudget(50),
    lambda: ThunderPolled(buffer_tokens=20),
]


def up(policy, replicas=2, blocks=10):
    for index in range(replicas):
        policy.replica_up(index, blocks, BLOCK)
    return policy


def arrive(policy, *keys, tokens=10, now=0.0):
    for key in keys:
        policy.request_turn(key, key, tokens, tokens, now)


def decided(policy, now=0.0):
    return {place.key: place.replica for place in policy.decide(now)}


def sample(policy, *, free_blocks, waiting=0, preempted=0):
    for index in range(2):
        policy.sample(index, KvSample(free_blocks, 1, waiting, preempted), 0.0)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("seed", range(5))
def test_the_contract(make, seed):
    contracts.check_balancer(make, seed=seed)


@pytest.mark.parametrize("make", ALL)
def test_a_trajectory_stays_on_its_replica_and_leaves_one_that_drains(make):
    policy = up(make())
    arrive(policy, 1, 2)
    home = decided(policy)[1]
    policy.turn_finished(1, 20, 1.0)
    policy.turn_finished(2, 20, 1.0)
    arrive(policy, 2, 1, tokens=20)
    assert decided(policy, 1.0)[1] == home
    policy.replica_drain(home)
    policy.turn_finished(1, 30, 2.0)
    policy.trajectory_ended(2, 20, True)
    policy.replica_down(home)
    arrive(policy, 1, tokens=30)
    assert decided(policy, 2.0) == {1: 1 - home}
    assert policy.waiting() == 0


@pytest.mark.parametrize("make", ALL)
def test_who_waits_for_tools_or_to_go_home_when_its_replica_drains_goes_elsewhere(make):
    policy = up(make())
    arrive(policy, 1, 2)
    homes = decided(policy)
    policy.turn_finished(1, 20, 1.0)
    policy.turn_finished(2, 20, 1.0)
    arrive(policy, 1, tokens=20)
    policy.replica_drain(homes[1])
    arrive(policy, 2, tokens=20)
    assert set(decided(policy, 1.0).items()) == {(1, 1 - homes[1]), (2, 1 - homes[1])}


@pytest.mark.parametrize("make", [make for make in ALL if make is not RoundRobin])
def test_events_that_cannot_be_are_refused(make):
    policy = up(make())
    with pytest.raises(ValueError, match="replica 0 is up already"):
        policy.replica_up(0, 1, 1)
    arrive(policy, 1)
    with pytest.raises(ValueError, match="trajectory 1 arrives while waiting"):
        arrive(policy, 1)
    with pytest.raises(ValueError, match="trajectory 1 ends a turn while it waits"):
        policy.turn_finished(1, 10, 0.0)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Capped(0), "cap"),
        (lambda: TokenBudget(0), "max_tokens"),
        (lambda: ThunderPolled(-1), "interval_s"),
    ],
)
def test_wrong_numbers_are_refused(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def test_static_split_cuts_into_contiguous_parts_and_goes_on_with_the_next_replica():
    policy = up(StaticSplit(), replicas=3)
    arrive(policy, *range(7))
    assert decided(policy) == {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2}
    arrive(policy, 7)
    assert decided(policy) == {7: 0}
    arrive(policy, 8, 9)
    assert decided(policy) == {8: 1, 9: 2}


def test_a_barrier_waits_for_the_slowest_trajectory():
    policy = up(Lockstep())
    arrive(policy, 1, 2)
    assert decided(policy) == {1: 0, 2: 1}
    policy.turn_finished(1, 20, 1.0)
    arrive(policy, 1, tokens=25)
    assert decided(policy) == {}
    policy.trajectory_ended(2, 50, True)
    assert decided(policy) == {1: 0}


def test_round_robin_alternates_whatever_is_there():
    policy = up(RoundRobin())
    arrive(policy, 1, 2, 3)
    assert decided(policy) == {1: 1, 2: 0, 3: 1}


def test_least_in_flight_counts_tool_waiting_ones_and_stops_at_its_cap():
    policy = up(Capped(2))
    arrive(policy, *range(5))
    assert decided(policy) == {0: 0, 1: 1, 2: 0, 3: 1}
    policy.turn_finished(1, 20, 1.0)
    assert decided(policy) == {}
    policy.trajectory_ended(3, 30, True)
    assert decided(policy) == {4: 1}


def test_a_token_budget_admits_what_surely_fits_and_at_least_one():
    policy = up(TokenBudget(45))  # 5 blocks each, 10 per replica
    arrive(policy, *range(5))
    assert decided(policy) == {0: 0, 1: 1, 2: 0, 3: 1}
    policy = up(TokenBudget(500))
    arrive(policy, *range(3))
    assert decided(policy) == {0: 0, 1: 1}


def test_thunder_pauses_the_smallest_idle_ones_and_resumes_them_before_new_ones():
    policy = up(ThunderPolled(interval_s=1.0, buffer_tokens=0), replicas=1)
    arrive(policy, 1, 2, 3, tokens=20)
    assert decided(policy) == {1: 0, 2: 0, 3: 0}
    policy.turn_finished(1, 40, 0.0)
    policy.turn_finished(2, 25, 0.0)
    arrive(policy, 4, tokens=20)
    for _ in range(40):  # the third grows to 60: 125 of 100
        policy.sample(0, KvSample(0, 1, 0, 0), 0.0)
    assert decided(policy, 0.9) == {}
    assert decided(policy, 1.0) == {}, "the smaller one has lost its place, and the others fill the replica"
    arrive(policy, 2, tokens=25)
    arrive(policy, 1, tokens=40)
    assert decided(policy, 1.1) == {1: 0}, "it kept its place"
    policy.trajectory_ended(3, 60, True)
    assert list(decided(policy, 2.0)) == [2, 4]


def test_thunder_gives_an_empty_replica_to_one_that_is_too_large():
    policy = up(ThunderPolled(), replicas=1)
    arrive(policy, 1, 2, tokens=95)
    assert decided(policy) == {1: 0}


def test_thunder_takes_the_emptiest_replica_that_has_room():
    policy = up(ThunderPolled(buffer_tokens=0))
    arrive(policy, 1, tokens=50)
    arrive(policy, 2, tokens=30)
    arrive(policy, 3, tokens=40)
    assert decided(policy) == {1: 0, 2: 1, 3: 1}


def test_the_polled_one_fills_a_replica_and_gives_places_only_when_it_polls():
    policy = up(ThunderPolled(interval_s=1.0, buffer_tokens=0))
    arrive(policy, 1, tokens=100)
    arrive(policy, 2, tokens=60)
    assert decided(policy) == {1: 0, 2: 1}
    arrive(policy, 3, tokens=40)
    policy.turn_finished(2, 60, 0.5)
    arrive(policy, 2, tokens=60)
    assert decided(policy, 0.9) == {2: 1}, "home at once, while the new one waits"
    assert policy.waiting() == 1
    assert decided(policy, 1.0) == {3: 1}


def test_the_polled_one_takes_the_place_of_running_ones_at_the_end_of_their_turn():
    policy = up(ThunderPolled(interval_s=1.0, buffer_tokens=0), replicas=1)
    arrive(policy, 1, 2, tokens=45)
    assert decided(policy) == {1: 0, 2: 0}
    for _ in range(10):  # 110 of 100
        policy.sample(0, KvSample(0, 2, 0, 0), 0.0)
    decided(policy, 1.0)
    decided(policy, 2.0)
    policy.turn_finished(2, 56, 2.1)
    policy.turn_finished(1, 55, 2.1)
    arrive(policy, 2, tokens=56)
    arrive(policy, 1, tokens=55)
    assert decided(policy, 2.2) == {2: 0}, "the smaller one was marked, once"
    policy.trajectory_ended(2, 56, True)
    assert decided(policy, 3.0) == {1: 0}


def test_the_cap_is_as_many_as_fit_at_the_mean_length():
    trace = generate("agentic", 1)
    setting = Setting.of(trace, kv_tokens=10 * sum(row.total_tokens for row in trace) // len(trace))
    policy = POLICIES["cap"](setting)
    policy.replica_up(0, 10**6, 1)
    arrive(policy, *range(20))
    assert len(decided(policy)) in (9, 10)
