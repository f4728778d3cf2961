"""The KV-aware balancer: each rule as a table, its invariants under any sequence of events."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.balancing.kv_aware import KvAware
from engine.balancing.kv_ledger import KNOWN
from engine.replica.port import KvSample
from tests.support.examples import examples

BLOCK = 32


def balancer(replicas=1, blocks=100, max_tokens=320, **options):
    found = KvAware(max_tokens, **{"hold_s": 25.0, **options})
    for index in range(replicas):
        found.replica_up(index, blocks, BLOCK)
    return found


def arrive(policy, *keys, tokens=32, group=None, now=0.0):
    for key in keys:
        policy.request_turn(key, key if group is None else group, tokens, tokens, now)


def decided(policy, now=0.0):
    places = policy.decide(now)
    policy.check()
    return [(place.key, place.replica, place.rule) for place in places]


def free(blocks, running=0, prefilled=0, steps=1):
    return KvSample(free_blocks=blocks, running=running, waiting=0, preempted=0, prefilled=prefilled, steps=steps)


def learn_costs(policy, *, replicas=1, per_request_s=0.01, per_token_s=0.001):
    """Steps from which 10 ms + 10 ms a request + 1 ms a prefilled token are learnt; then nothing runs."""
    for index in range(replicas):
        now = 0.0
        for step in range(100):
            running, prefilled = 1 + step % 5, 10 * (step % 3)
            now += 0.01 + per_request_s * running + per_token_s * prefilled
            policy.sample(index, free(1000, running, prefilled), now)
        policy.sample(index, free(1000), now)


def test_an_empty_replica_takes_the_first_in_line_whatever_it_needs():
    policy = balancer(blocks=1)
    arrive(policy, 1, 2)
    assert decided(policy) == [(1, 0, "empty")]
    policy.trajectory_ended(1, 320, True)
    assert decided(policy) == [(2, 0, "empty")]


def test_admission_stops_where_the_predicted_use_fills_the_replica():
    policy = balancer(blocks=100)
    arrive(policy, *range(100))
    admitted = [key for key, _, _ in decided(policy)]
    assert admitted == list(range(len(admitted)))
    assert policy.waiting() == 100 - len(admitted)
    # sizes are exponential of scale 80 at first: at the fullest 1 / e of them hold 80 tokens (0.92 blocks on average,
    # 1.2 as standard deviation), and each has a prompt of one block and half a block lost; 92.5 may be used
    use = {count: 2.42 * count + 0.5 * 1.2 * count**0.5 for count in (35, 38)}
    assert use[35] < 92.5 < use[38]
    assert 35 <= len(admitted) < 38
    assert policy.reserved_blocks() > 0


def test_the_cheaper_a_preemption_the_more_are_admitted():
    def admitted(per_token_s, **options):
        policy = balancer(blocks=1000, **options)
        arrive(policy, *range(1200))
        before = decided(policy)
        learn_costs(policy, per_token_s=per_token_s)
        for count, (key, _, _) in enumerate(before + decided(policy)):
            policy.trajectory_ended(key, 200, count < 16)  # as many ends in all cases
        return len(decided(policy))

    cheap, some, dear = (admitted(per_token_s) for per_token_s in (1e-7, 2e-5, 0.1))
    assert cheap > some > dear
    assert (cheap, dear) == (admitted(0.1, caution=0.0), admitted(1e-5, caution=1.0))


def test_short_ends_let_more_in_and_long_runs_fewer():
    def admitted(sizes, steps):
        policy = balancer(replicas=2, blocks=60)
        for key, size in enumerate(sizes):
            policy.request_turn(key, key, 32, 32, 0.0)
            policy.decide(0.0)
            policy.trajectory_ended(key, 32 + size, True)
        arrive(policy, *range(1000, 1010))
        decided(policy)
        for index in range(2):
            policy.sample(index, free(60, 5, steps=steps), 0.0)
            policy.sample(index, free(60, 5), 0.0)
        arrive(policy, *range(2000, 2100))
        return len(decided(policy))

    assert admitted([8] * 40, 1) > admitted([], 1) > admitted([280] * 40, 1)
    assert admitted([], 150) < admitted([], 1)


def test_what_waited_and_left_or_was_cancelled_teaches_nothing():
    policy = balancer(blocks=1000)
    before = policy.lengths.expected_remaining(10)
    for key in range(40):
        arrive(policy, key)
        if key % 2:
            decided(policy)
        policy.trajectory_ended(key, 40, not key % 2)
    arrive(policy, 99)
    decided(policy)
    assert policy.lengths.expected_remaining(10) == before


def test_live_free_blocks_are_a_hard_check_and_placements_count_until_they_are_seen():
    policy = balancer(blocks=1000)
    arrive(policy, 0)
    decided(policy)
    policy.sample(0, free(1000, running=1), 0.0)
    policy.sample(0, free(5, running=1), 0.0)
    arrive(policy, 1, 2, 3, 4)  # two blocks each now, one for each that runs
    assert [key for key, _, _ in decided(policy)] == [1, 2]
    policy.sample(0, free(5, running=1), 0.0)
    assert decided(policy) == [], "a sample may be older than what was sent before it"
    policy.sample(0, free(5, running=3), 0.0)
    assert [key for key, _, _ in decided(policy)] == [3]


def test_a_resident_group_prompt_needs_no_free_blocks():
    policy = balancer(blocks=1000, max_tokens=6400)
    arrive(policy, 1, group=1, tokens=640)
    decided(policy)
    for _ in range(2):
        policy.sample(0, free(5, running=1), 0.0)
    arrive(policy, 2, group=1, tokens=640)
    arrive(policy, 3, group=2, tokens=640)
    assert decided(policy) == [(2, 0, "headroom")]


def test_members_that_go_on_half_done_hold_more_than_their_groups_prompt():
    policy = balancer(blocks=1000)
    for key, tokens in [(1, 640), (2, 640), (3, 64)]:
        policy.request_turn(key, 7, 64, tokens, 0.0)
    assert len(decided(policy)) == 3
    lost = 3 * BLOCK // 2  # half a block each
    assert policy._ledger.replicas[0].reserved_H[0] == 64 + 2 * (640 - 64) + lost


def test_more_headroom_wins_and_a_resident_group_prompt_counts_as_its_blocks():
    policy = balancer(replicas=2, blocks=1000, max_tokens=3200)
    arrive(policy, 1, group=1, tokens=96)
    arrive(policy, 2, group=2, tokens=96)
    assert decided(policy) == [(1, 0, "headroom"), (2, 1, "headroom")]
    arrive(policy, 3, group=2, tokens=96)
    assert decided(policy) == [(3, 1, "headroom")], "its prompt is there"
    arrive(policy, 4, group=3, tokens=96)
    assert decided(policy) == [(4, 0, "headroom")], "less is reserved there"


def test_ready_goes_home_before_everybody_else():
    policy = balancer(replicas=2)
    arrive(policy, 1, 2)
    decided(policy)
    policy.turn_finished(2, 64, 1.0)
    arrive(policy, 3)
    arrive(policy, 2, tokens=70, now=2.0)
    assert decided(policy, 2.0)[0] == (2, 1, "home")


def test_the_first_in_line_is_not_overtaken_by_one_that_would_fit():
    policy = balancer(blocks=20, max_tokens=10)
    arrive(policy, 1)
    decided(policy)
    arrive(policy, 2, tokens=640)
    arrive(policy, 3)
    assert decided(policy) == []
    policy.trajectory_ended(1, 42, True)
    assert decided(policy)[0] == (2, 0, "empty")


def test_a_fresh_one_does_not_overtake_a_parked_one():
    policy = balancer(blocks=30, max_tokens=800, hold_s=1.0)
    arrive(policy, 1, tokens=700)
    decided(policy)
    policy.turn_finished(1, 700, now=0.0)
    arrive(policy, 2, tokens=320)
    assert decided(policy, 2.0) == [(2, 0, "empty")]
    arrive(policy, 1, tokens=750, now=3.0)
    for _ in range(2):
        policy.sample(0, free(20, running=1), 3.0)
    arrive(policy, 3)
    assert decided(policy, 3.0) == []


def test_a_tool_wait_keeps_its_place_until_hold_s_then_it_is_parked():
    policy = balancer(blocks=3)  # one trajectory fills it
    arrive(policy, 1)
    decided(policy)
    policy.turn_finished(1, 64, now=0.0)
    arrive(policy, 2)
    assert decided(policy, 25.0) == []
    assert decided(policy, 25.1) == [(2, 0, "empty")]
    arrive(policy, 1, tokens=70, now=30.0)
    arrive(policy, 3)
    assert decided(policy, 30.0) == []
    policy.trajectory_ended(2, 100, True)
    assert decided(policy, 30.0) == [(1, 0, "empty")], "it was parked before the fresh one came"


def test_of_the_parked_the_smallest_goes_first_and_fresh_ones_that_were_there_before_them_go_before_them():
    policy = balancer(blocks=100, max_tokens=1600, hold_s=1.0)
    arrive(policy, 1, 2, tokens=320)
    assert len(decided(policy)) == 2
    arrive(policy, 3, tokens=5000)
    policy.turn_finished(1, 400, now=0.0)
    policy.turn_finished(2, 350, now=0.0)
    arrive(policy, 1, tokens=410, now=2.0)
    arrive(policy, 2, tokens=360, now=2.0)
    arrive(policy, 4, tokens=64, now=2.0)
    assert decided(policy, 2.0) == [(3, 0, "empty")]
    policy.trajectory_ended(3, 5000, False)
    for _ in range(2):
        policy.sample(0, free(100), 2.0)
    assert [key for key, _, _ in decided(policy, 2.0)] == [2, 1, 4]
    for key in (2, 1, 4):
        policy.trajectory_ended(key, 500, True)
    arrive(policy, 5)
    assert decided(policy, 2.0) == [(5, 0, "headroom")]
    assert policy._ledger._parked == []


def test_a_replica_that_will_overflow_sheds_the_smallest_at_the_end_of_their_turns():
    policy = balancer(blocks=100, max_tokens=800, moves=0)
    arrive(policy, *range(8), tokens=200)
    assert len(decided(policy)) == 8
    arrive(policy, 99, tokens=3000)  # somebody waits
    for key, tokens in [(0, 260), (1, 330)]:
        policy.turn_finished(key, tokens, now=0.0)
        arrive(policy, key, tokens=tokens + 10, now=0.0)
        assert (key, 0, "home") in decided(policy, 0.0)
    policy.sample(0, free(10, running=8, steps=130), 1.0)  # each is 130 tokens longer
    policy.decide(1.0)
    leaving = {key for key, found in policy._ledger.trajectories.items() if found.leaves}
    assert set() < leaving < set(range(2, 8)), "the two that are longer stay"
    for key in range(8):
        policy.turn_finished(key, 480, now=2.0)
    homeless = {key for key in range(8) if policy._ledger.trajectories[key].home is None}
    assert homeless == leaving
    for key in range(8):
        arrive(policy, key, tokens=490, now=2.0)
    assert {key for key, _, rule in decided(policy, 2.0) if rule == "home"} == set(range(8)) - leaving


def about_to_overflow():
    """Eight trajectories that have grown by 210 tokens each; a ninth, 99, waits."""
    policy = balancer(blocks=100, max_tokens=800, moves=0)
    arrive(policy, *range(8), tokens=200)
    decided(policy)
    arrive(policy, 99, tokens=3000)
    policy.sample(0, free(40, running=8, steps=210), 1.0)
    policy.decide(1.0)
    return policy


def test_who_was_to_leave_stays_when_the_forecast_has_fallen():
    policy = about_to_overflow()
    assert any(found.leaves for found in policy._ledger.trajectories.values())
    for key in range(3, 8):
        policy.trajectory_ended(key, 420, True)
    policy.sample(0, free(60, running=3, steps=30), 2.0)
    policy.decide(2.0)
    assert not any(found.leaves for found in policy._ledger.trajectories.values())


def test_in_the_tail_nobody_is_shed():
    policy = balancer(blocks=100, max_tokens=800, moves=0)
    arrive(policy, *range(12), tokens=100)
    assert len(decided(policy)) == 12
    for key in range(4, 12):
        policy.trajectory_ended(key, 110, True)
    for _ in range(2):
        policy.sample(0, free(5, running=4, steps=400), 1.0)
        policy.decide(1.0)
    assert policy.reserved_blocks() > 100
    assert not any(found.leaves for found in policy._ledger.trajectories.values())


def test_who_was_to_leave_stays_when_the_tail_has_come():
    policy = about_to_overflow()
    assert policy._ledger.trajectories[0].leaves
    policy.trajectory_ended(99, 3000, False)
    for key in range(4, 8):
        policy.trajectory_ended(key, 410, True)
    policy.sample(0, free(2, running=4, steps=400), 2.0)
    policy.decide(2.0)
    assert policy.reserved_blocks() > 100
    assert not any(found.leaves for found in policy._ledger.trajectories.values())


def test_growth_that_nothing_foresaw_is_seen_in_the_blocks_and_forecast_anew():
    policy = balancer(blocks=200, max_tokens=3200)
    arrive(policy, *range(4), tokens=320)
    assert len(decided(policy)) == 4
    before = policy.reserved_blocks()
    policy.lengths.refresh = lambda *_: None  # nothing ends, and nothing is learnt
    policy.sample(0, free(120, running=4, steps=400), 1.0)
    policy.decide(1.0)
    assert policy.reserved_blocks() < 2 * before, "it is less than half full"
    policy.sample(0, free(20, running=4, steps=400), 2.0)
    policy.decide(2.0)
    assert policy.reserved_blocks() * 2 > 200


@pytest.mark.parametrize(
    ("most", "groups", "places"),
    [(400, [0, 0, 1, 1], [0, 0, 1, 1]), (400, [0, 0, 0, 0], [0, 0, 1, 1]), (4000, [0, 0, 1, 1], [0, 1, 0, 1])],
)
def test_a_group_stays_together_where_its_prompt_is_long_beside_what_may_follow(most, groups, places):
    policy = balancer(replicas=2, blocks=1000, max_tokens=most)
    for key, group in enumerate(groups):
        arrive(policy, key, group=group, tokens=200)
    assert [place.replica for place in policy.decide(0.0)] == places


@pytest.mark.parametrize("crowded", [True, False])
def test_where_more_is_held_than_there_is_those_who_wait_longest_for_tools_lose_their_places(crowded):
    policy = balancer(blocks=20, max_tokens=240, moves=0)
    policy._shed = lambda state: None  # another rule
    arrive(policy, 1, 2, 3)
    assert len(decided(policy)) == 3
    for key, tokens in [(2, 200), (1, 200)]:
        policy.turn_finished(key, tokens, now=0.0)
    if crowded:
        arrive(policy, 4, tokens=1000)
    assert decided(policy, 1.0) == []
    policy.sample(0, free(2, running=1, steps=300), 1.0)  # the third holds 300 more: 700 of 640 tokens
    assert decided(policy, 1.0) == []
    policy.trajectory_ended(4, 1000, False)
    for key, expected in [(1, "home"), (2, "headroom")]:
        arrive(policy, key, tokens=210, now=2.0)
        policy.trajectory_ended(3, 400, False)
        policy.sample(0, free(20), 2.0)
        assert decided(policy, 2.0) == [(key, 0, expected)]


def test_no_forecast_is_made_while_all_fit_even_at_their_bound():
    policy = balancer(blocks=100, max_tokens=320)
    learnt = policy.lengths.version
    for key in range(30):
        arrive(policy, key, group=0)
        assert decided(policy) == [(key, 0, "headroom")]
        if key >= 7:  # eight of 320 fill 2,560 of the 2,720 tokens that are given out
            policy.trajectory_ended(key - 7, 200, True)
    assert policy.lengths.version == learnt
    arrive(policy, 30, 31, group=0)
    assert len(decided(policy)) == 2, "it is known by now that they end at 200"
    assert policy.lengths.version > learnt


def test_what_was_predicted_for_groups_that_are_gone_is_forgotten_also_while_all_fit():
    policy = balancer(blocks=1000)
    for key in range(10_000):
        arrive(policy, key)
        assert len(decided(policy)) == 1
        policy.trajectory_ended(key, 40, True)
    assert len(policy._ledger._remembered) <= KNOWN


def test_a_place_is_held_as_long_as_computing_a_full_cache_takes():
    policy = balancer(blocks=100, max_tokens=2800, hold_s=None)
    learn_costs(policy)  # 1 ms a token: 3.2 s for 3,200
    arrive(policy, 1)
    decided(policy)
    for wait_s, expected in [(2.9, "home"), (3.5, "headroom")]:
        policy.turn_finished(1, 64, now=0.0)
        arrive(policy, 1, tokens=70, now=wait_s)
        assert decided(policy, wait_s) == [(1, 0, expected)]


def test_what_ran_or_waited_on_a_dead_replica_goes_elsewhere():
    policy = balancer(replicas=2)
    arrive(policy, 1, 2, 3, 4)
    places = {key: replica for key, replica, _ in decided(policy)}
    running, ready = [key for key in places if places[key] == 0]
    policy.turn_finished(ready, 50, 0.0)
    arrive(policy, ready, tokens=60)
    policy.replica_down(0)
    policy.check()
    arrive(policy, running, tokens=40)
    assert sorted(decided(policy)) == sorted([(running, 1, "headroom"), (ready, 1, "headroom")])
    for key in places:
        policy.trajectory_ended(key, 70, True)
    assert policy.reserved_blocks() == 0


def test_a_turn_may_end_in_the_moment_its_replica_dies():
    policy = balancer()
    arrive(policy, 1)
    decided(policy)
    policy.replica_down(0)
    policy.turn_finished(1, 50, 0.0)
    arrive(policy, 1, tokens=60)
    assert decided(policy) == []
    policy.replica_up(0, 100, BLOCK)
    assert decided(policy) == [(1, 0, "headroom")]


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
        policy.turn_finished(1, 2, 0.0)
    decided(policy)
    with pytest.raises(ValueError, match="trajectory 1 arrives while running"):
        arrive(policy, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"caution": 1.5}, r"caution must be .* in \[0, 1\], got 1.5"),
        ({"moves": -1}, "moves must be at least 0, got -1"),
    ],
)
def test_wrong_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        balancer(**options)


def test_leave_is_idempotent_and_a_late_sample_of_a_dead_replica_is_ignored():
    policy = balancer()
    arrive(policy, 1)
    decided(policy)
    policy.trajectory_ended(1, 10, True)
    policy.trajectory_ended(1, 10, True)
    policy.replica_down(0)
    policy.sample(0, free(3), 0.0)
    policy.check()


def test_nothing_new_goes_to_a_draining_replica_and_what_runs_there_moves_away():
    policy = balancer(replicas=2, blocks=1000)
    arrive(policy, 1, 2, 3)
    assert decided(policy) == [(1, 0, "headroom"), (2, 1, "headroom"), (3, 0, "headroom")]
    policy.turn_finished(3, 50, 0.0)
    policy.replica_drain(0)
    policy.check()
    arrive(policy, 4)
    assert decided(policy) == [(1, 1, "drain"), (4, 1, "headroom")]
    arrive(policy, 3, tokens=60, now=1.0)
    assert decided(policy, 1.0) == [(3, 1, "headroom")], "its prefix is given up"


def test_those_that_find_no_room_stay_on_a_draining_replica_until_there_is_some():
    policy = balancer(replicas=2, blocks=2)
    arrive(policy, 1, 2)
    assert decided(policy) == [(1, 0, "empty"), (2, 1, "empty")]
    policy.replica_drain(0)
    assert decided(policy) == []
    policy.trajectory_ended(2, 50, True)
    assert decided(policy) == [(1, 1, "drain")]


def crowd(policy, count):
    """`count` trajectories on replica 0 of two, which the second, coming later, does not have."""
    policy.replica_up(0, 1000, BLOCK)
    learn_costs(policy)
    arrive(policy, *range(count))
    assert {replica for _, replica, _ in decided(policy)} == {0}
    policy.sample(0, free(900, count), 2.0)
    policy.replica_up(1, 1000, BLOCK)


def test_in_the_tail_a_running_trajectory_moves_to_a_faster_replica_with_its_costs():
    policy = KvAware(320, hold_s=25.0)
    crowd(policy, 10)
    (place,) = policy.decide(3.0)
    assert (place.replica, place.rule) == (1, "level")
    # 74 tokens at 110 ms a step; or at 20 ms, and twice 33 tokens to compute again at 1 ms
    assert place.go_s < 0.85 * place.stay_s
    assert 7 < place.stay_s < 9
    assert decided(policy, 3.0) == [], "not again at once"
    policy.turn_finished(place.key, 64, 3.1)
    arrive(policy, place.key, tokens=70, now=3.2)
    assert decided(policy, 3.2) == [(place.key, 1, "home")]


def test_in_the_tail_a_turn_begins_on_a_faster_replica():
    policy = KvAware(320, hold_s=25.0)
    crowd(policy, 10)
    policy.turn_finished(4, 64, 3.0)
    arrive(policy, 4, tokens=70, now=3.1)
    assert decided(policy, 3.1)[0] == (4, 1, "tail")


def test_nobody_moves_while_others_wait_nor_more_often_than_allowed():
    policy = KvAware(320, hold_s=25.0, moves=1)
    crowd(policy, 10)
    arrive(policy, 99, tokens=10**6)
    assert decided(policy, 3.0) == [(99, 1, "empty")]
    arrive(policy, 98, tokens=10**6)
    assert decided(policy, 3.0) == []
    policy.trajectory_ended(99, 10, False)
    policy.trajectory_ended(98, 10, False)
    for _ in range(2):
        policy.sample(1, free(1000), 3.5)
    moved = [place.key for now in range(4, 100) for place in policy.decide(float(now))]
    assert len(moved) == len(set(moved)) > 1
    for key in set(range(10)) - set(moved):
        policy.trajectory_ended(key, 60, True)
    policy.sample(0, free(1000), 100.0)
    assert [place for now in range(101, 200) for place in policy.decide(float(now))] == []


def test_events_of_before_a_move_are_taken():
    """It ended its turn, left, or its old replica died while the move was on its way."""
    for event in ("turn_finished", "trajectory_ended", "down", "new down"):
        policy = KvAware(320, hold_s=25.0)
        crowd(policy, 10)
        (place,) = policy.decide(3.0)
        if event == "turn_finished":
            policy.turn_finished(place.key, 64, 3.1)
        elif event == "trajectory_ended":
            policy.trajectory_ended(place.key, 64, True)
        elif event == "down":
            policy.replica_down(0)
            arrive(policy, place.key, tokens=40)
            policy.check()
            assert (place.key, 1, "headroom") in decided(policy, 3.2)
        else:
            policy.replica_down(1)
            arrive(policy, place.key, tokens=40)
            assert (place.key, 0, "headroom") in decided(policy, 3.2)
        policy.check()


class Machine(RuleBasedStateMachine):
    """The node's side of the contract, at random: replicas come and go, trajectories leave in every state."""

    def __init__(self):
        super().__init__()
        self.now, self.key = 0.0, 0
        self.policy = KvAware(max_tokens=200, hold_s=20.0, history=16)
        self.up = {}
        self.draining = set()
        self.state = {}  # key -> "waiting" | "tool" | the replica on which it runs
        self.order = []  # fresh keys in the order of arrival

    @rule(blocks=st.integers(1, 40), replica=st.integers(0, 2))
    def replica_comes(self, replica, blocks):
        if replica not in self.up:
            self.up[replica] = blocks
            self.policy.replica_up(replica, blocks, 8)
            self.decide()

    @rule(replica=st.integers(0, 2))
    def replica_drains(self, replica):
        if replica in self.up and replica not in self.draining:
            self.draining.add(replica)
            self.policy.replica_drain(replica)
            self.decide()

    @rule(replica=st.integers(0, 2))
    def replica_goes(self, replica):
        if self.up.pop(replica, None) is None:
            return
        self.draining.discard(replica)
        self.policy.replica_down(replica)
        for key in [key for key, state in self.state.items() if state == replica]:
            self.policy.request_turn(key, key % 3, 30, 30, self.now)
            self.state[key] = "waiting"
        self.decide()

    @rule(
        replica=st.integers(0, 2),
        share=st.floats(0, 1),
        prefilled=st.integers(0, 100),
        count=st.integers(1, 100),
        steps=st.integers(1, 40),
    )
    def steps(self, replica, share, prefilled, count, steps):
        """Enough of them, and costs are known."""
        running = sum(state == replica for state in self.state.values())
        for number in range(count):
            self.now += 0.01 + 0.02 * running + 0.001 * number % 2 * prefilled
            sample = free(int(share * self.up.get(replica, 0)), running, number % 2 * prefilled, steps)
            self.policy.sample(replica, sample, self.now)
        self.decide()

    @rule(count=st.integers(1, 4), tokens=st.integers(1, 150))
    def new(self, count, tokens):
        for _ in range(count):
            self.key += 1
            self.policy.request_turn(self.key, self.key % 3, tokens, tokens, self.now)
            self.state[self.key] = "waiting"
            self.order.append(self.key)
        self.decide()

    @rule(pick=st.integers(0, 50), tokens=st.integers(1, 250))
    def turn_ends(self, pick, tokens):
        if keys := [key for key, state in self.state.items() if isinstance(state, int)]:
            key = keys[pick % len(keys)]
            self.policy.turn_finished(key, tokens, self.now)
            self.state[key] = "tool"
            self.decide()

    @rule(pick=st.integers(0, 50), tokens=st.integers(1, 250))
    def tool_answers(self, pick, tokens):
        if keys := [key for key, state in self.state.items() if state == "tool"]:
            key = keys[pick % len(keys)]
            self.policy.request_turn(key, key % 3, tokens, tokens, self.now)
            self.state[key] = "waiting"
            self.decide()

    @rule(pick=st.integers(0, 50), tokens=st.integers(1, 250), twice=st.booleans(), finished=st.booleans())
    def leaves(self, pick, tokens, twice, finished):
        if self.state:
            key = list(self.state)[pick % len(self.state)]
            del self.state[key]
            if key in self.order:
                self.order.remove(key)
            for _ in range(1 + twice):
                self.policy.trajectory_ended(key, tokens, finished)
            self.decide()

    @rule(seconds=st.floats(0.1, 15))
    def time_passes(self, seconds):
        self.now += seconds

    @rule()
    def decide(self):
        ledger = self.policy._ledger
        queued = {key: found.queued for key, found in ledger.trajectories.items()}
        parked = set(ledger.queues["parked"])
        waited = self.policy.waiting()
        for place in self.policy.decide(self.now):
            before = self.state[place.key]
            assert before != "tool", place
            assert before != place.replica, place
            assert place.replica in self.up, place
            assert place.replica not in self.draining or place.rule == "home", place
            if isinstance(before, int):
                assert place.rule == "drain" or not parked | set(self.order), "moved while others wait"
                assert self.policy._ledger.trajectories[place.key].moves > 0, place
            self.state[place.key] = place.replica
            parked.discard(place.key)
            if place.key in self.order:
                assert self.order.pop(0) == place.key, "a fresh one was overtaken"
                assert all(queued[place.key] < queued[key] for key in parked), "it came later and overtook a parked one"
        waiting = [key for key, state in self.state.items() if state == "waiting"]
        idle = [index for index in self.up if index not in self.draining and not ledger.replicas[index].active]
        assert not (waiting and idle), f"{waiting} wait while {idle} have nothing to do"
        assert self.policy.waiting() == len(waiting) <= waited
        assert {key: found.home for key, found in ledger.trajectories.items() if found.state == "running"} == {
            key: state for key, state in self.state.items() if isinstance(state, int)
        }

    @invariant()
    def holds(self):
        self.policy.check()

    def teardown(self):
        for key in list(self.state):
            self.policy.trajectory_ended(key, 10, True)
        self.policy.check()
        assert self.policy.reserved_blocks() == self.policy.waiting() == 0
        assert not self.policy._ledger.groups


TestMachine = Machine.TestCase
TestMachine.settings = settings(examples(100), stateful_step_count=50)
