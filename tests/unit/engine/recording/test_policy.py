"""What is kept of a long run: the newest whole, thinner before, within a budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.recording.policy import RecordConfig, deletions


def kept(step_bytes, config):
    return sorted(step_bytes.keys() - set(deletions(step_bytes, config)))


def test_the_newest_stay_and_of_the_others_the_first_and_each_nth():
    steps = dict.fromkeys(range(1, 31), 1)
    assert kept(steps, RecordConfig(newest=3, every=10)) == [1, 10, 20, 28, 29, 30]


def test_thinning_step_by_step_leaves_the_same_as_thinning_at_the_end():
    config, there = RecordConfig(newest=5, every=7), {}
    for step in range(1, 200):
        there[step] = 1
        for gone in deletions(there, config):
            del there[gone]
    assert sorted(there) == kept(dict.fromkeys(range(1, 200), 1), config)


def test_over_the_budget_the_older_ones_get_twice_as_far_apart_until_they_fit():
    steps = dict.fromkeys(range(1, 101), 100 << 10)
    config = RecordConfig(newest=4, every=4, max_mb=1)  # room for ten
    assert kept(steps, config) == [1, 32, 64, 96, 97, 98, 99, 100]


def test_where_the_newest_alone_are_too_many_the_oldest_of_them_go():
    steps = dict.fromkeys(range(1, 11), 400 << 10)
    assert kept(steps, RecordConfig(newest=8, every=2, max_mb=1)) == [9, 10]


@given(st.dictionaries(st.integers(1, 500), st.integers(0, 1 << 20)), st.integers(1, 20), st.integers(1, 50))
def test_what_is_kept_is_always_within_the_budget(steps, newest, every):
    config = RecordConfig(newest=newest, every=every, max_mb=1)
    there = kept(steps, config)
    assert sum(steps[step] for step in there) <= config.max_bytes
    assert set(deletions(steps, config)) <= set(steps)


def test_nothing_is_deleted_while_there_is_room():
    assert deletions(dict.fromkeys(range(1, 51), 1), RecordConfig()) == []


def test_a_run_of_ten_thousand_steps_is_spread_over_its_whole_length():
    steps = dict.fromkeys(range(1, 10_001), 300 << 10)
    there = kept(steps, RecordConfig())
    assert len(there) == 51 + 497  # every 20th, the first, and the newest
    assert there[0] == 1
    assert there[-50:] == list(range(9951, 10_001))


@pytest.mark.parametrize("field", ["newest", "every", "token_groups", "max_mb"])
def test_a_value_that_makes_no_sense_is_refused_by_name(field):
    with pytest.raises(ValueError, match=field):
        RecordConfig(**{field: -1})
