"""Who is granted what: by predicted room and by version, not by turns."""

import pytest

from engine.nodes.ledger import SILENT_BEATS, Key, Ledger


def a_ledger(*capacities, group_tokens=100):
    ledger = Ledger(group_tokens=group_tokens)
    for number, capacity in enumerate(capacities):
        session = b"%d" % number
        ledger.join(session, f"node-{number}", capacity_tokens=capacity)
        ledger.beat(session, version=0, free_tokens=capacity)
    return ledger


def want(ledger, count, first=0):
    for lease in range(first, first + count):
        ledger.want(Key(lease, 0), min_version=0)


def test_groups_go_where_most_room_is_predicted():
    ledger = a_ledger(1000, 500)
    want(ledger, 6)
    granted = [grant.session for grant in ledger.decide()]
    assert granted.count(b"0") == 5
    assert granted.count(b"1") == 1


def test_what_a_node_says_of_its_room_counts_with_what_was_granted_since():
    ledger = a_ledger(1000, 1000)
    ledger.beat(b"0", version=0, free_tokens=300)
    want(ledger, 8)
    granted = [grant.session for grant in ledger.decide()]
    assert granted.count(b"0") < granted.count(b"1")


def test_without_room_a_group_waits_but_nobody_idles():
    ledger = a_ledger(50, 50)
    want(ledger, 3)
    assert {grant.session for grant in ledger.decide()} == {b"0", b"1"}
    assert ledger.waiting == [Key(2, 0)]
    assert ledger.decide() == []


def test_the_oldest_group_is_granted_first():
    ledger = a_ledger(100)
    want(ledger, 3)
    assert [grant.key for grant in ledger.decide()] == [Key(0, 0)]


def test_a_slow_node_gets_fewer_groups():
    """It gives no room back while the other one does."""
    ledger = a_ledger(200, 200)
    want(ledger, 100)
    counts = {b"0": 0, b"1": 0}
    running = ledger.decide()
    for second in range(20):
        for grant in list(running):
            counts[grant.session] += 1
            if grant.session == b"0" or second % 4 == 3:  # the second node takes four times as long
                running.remove(grant)
                ledger.finish(grant.key, tokens=100)
        for session in counts:
            ledger.beat(session, version=0, free_tokens=200)
        running += ledger.decide()
    made = dict.fromkeys(counts, 0)
    for grant in running:
        made[grant.session] += 1
    assert 100 - len(ledger.waiting) > 40
    assert made[b"1"] <= 2
    finished_by_slow = counts[b"1"] / 4
    assert finished_by_slow < counts[b"0"] / 2


def test_the_size_of_a_group_is_learnt():
    ledger = a_ledger(1000)
    assert ledger.expected_tokens == 100
    want(ledger, 2)
    for grant, tokens in zip(ledger.decide(), (20, 40), strict=True):
        ledger.finish(grant.key, tokens=tokens)
    assert ledger.expected_tokens == 30


def test_a_lasting_member_is_never_silent():
    ledger = a_ledger(100)
    ledger.join(b"", "the lead", capacity_tokens=100, lasting=True)
    for _ in range(SILENT_BEATS):
        assert ledger.tick() == []
    assert ledger.tick() == [b"0"]


@pytest.mark.parametrize("behind", [0, 1])
def test_a_group_waits_for_a_node_with_its_version(behind):
    ledger = a_ledger(100)
    ledger.beat(b"0", version=4 - behind, free_tokens=100)
    ledger.want(Key(9, 0), min_version=4)
    assert len(ledger.decide()) == 1 - behind


def test_a_session_that_began_again_gives_up_its_place_among_those_that_load():
    ledger = a_ledger(100, 100)
    for session in (b"0", b"1"):
        ledger.beat(session, version=0, free_tokens=100, pulled=1)
    [first] = ledger.may_load(1)
    [other] = {b"0", b"1"} - {first.session}
    assert ledger.may_load(1) == [], "one replica pauses at a time"
    ledger.join(b"again", first.name, capacity_tokens=100)  # it was killed, which nobody has noticed yet
    assert [member.session for member in ledger.may_load(1)] == [other]


def test_sessions_of_one_node_count_once():
    ledger = Ledger(group_tokens=100)
    for number in range(9):
        ledger.join(b"%d" % number, "one", capacity_tokens=100)
    ledger.join(b"other", "two", capacity_tokens=100)
    for session in (b"8", b"other"):
        ledger.beat(session, version=0, free_tokens=100, pulled=1)
    assert len(ledger.may_load(1)) == 1, "two replicas, one of which may pause"


def test_two_live_nodes_of_one_name_both_load():
    ledger = Ledger(group_tokens=100)
    loaded = set()
    for session in (b"a", b"b"):
        ledger.join(session, "one", capacity_tokens=100)
    for _ in range(6):
        for session in (b"a", b"b"):
            ledger.beat(session, version=int(session in loaded), free_tokens=100, pulled=1)
            loaded |= {member.session for member in ledger.may_load(1)}
    assert loaded == {b"a", b"b"}


def test_a_node_that_pauses_while_it_leaves_pauses_for_all():
    ledger = a_ledger(100, 100)
    for session in (b"0", b"1"):
        ledger.beat(session, version=0, free_tokens=100, pulled=1)
    [first] = ledger.may_load(1)
    first.leaving = True
    assert ledger.may_load(1) == [], "one of two replicas pauses already"
    ledger.leave(first.session)
    assert len(ledger.may_load(1)) == 1


def test_the_replicas_of_a_node_that_leaves_still_count():
    ledger = Ledger(group_tokens=100)
    for session, replicas in ((b"leaving", 6), (b"a", 1), (b"b", 1)):
        ledger.join(session, session.decode(), capacity_tokens=100, replicas=replicas)
        ledger.beat(session, version=0, free_tokens=100, pulled=1)
    ledger.members[b"leaving"].leaving = True
    assert [member.session for member in ledger.may_load(1)] == [b"a", b"b"], "two of eight replicas may pause"
