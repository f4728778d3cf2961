"""Predicted growth against closed forms and against draws of known distributions."""

import numpy as np
import pytest

from engine.balancing.length_forecast import HORIZONS, GroupStats, LengthForecast


def sizes(*values):
    return np.array(values, np.int64)


def learnt(ended, going=(), max_tokens=1000, **options):
    lengths = LengthForecast(max_tokens, **options)
    for size in ended:
        lengths.end(GroupStats(0), size)
    lengths.refresh(sizes(*going), [GroupStats(0) for _ in going], [])
    return lengths


def test_at_first_most_are_assumed_to_be_short():
    lengths = LengthForecast(1000)
    # exponential of scale 250, cut at 1,000: 250 - 1,000 / (e^4 - 1), and beyond 500 250 - 500 / (e^2 - 1)
    assert lengths.mean_tokens() == pytest.approx(231, rel=0.01)
    assert lengths.expected_remaining(500) == pytest.approx(172, rel=0.03)
    assert lengths.expected_remaining(1000) < lengths.bin_tokens
    rows_NH = lengths.predict(sizes(0), [GroupStats(0)])
    mean_H, variance_H = rows_NH[0, : len(HORIZONS)], rows_NH[0, len(HORIZONS) :]
    then_H = np.array([int(horizon * lengths.mean_tokens()) for horizon in HORIZONS])
    assert variance_H == pytest.approx(mean_H * (then_H - mean_H), rel=0.02, abs=500), "of a size that is there or not"


def test_as_many_horizons_are_looked_at_as_a_number_of_tokens_needs():
    lengths = learnt([400] * 1000)
    then_H = [horizon * lengths.mean_tokens() for horizon in HORIZONS]
    assert lengths.horizons_within(0) == 1
    for count, tokens in enumerate(then_H[:-1], 1):
        assert lengths.horizons_within(tokens + 2) == count + 1
    assert lengths.horizons_within(10**9) == len(HORIZONS)


def test_the_mean_of_what_ended_is_found():
    drawn = np.random.default_rng(0).lognormal(5, 0.6, 2000).clip(0, 999).astype(int)
    lengths = learnt(drawn)
    assert lengths.mean_tokens() == pytest.approx(drawn.mean(), rel=0.03)
    longer = drawn[drawn > 300]
    assert lengths.expected_remaining(300) == pytest.approx((longer - 300).mean(), rel=0.06)


def test_those_still_going_keep_the_first_ends_from_making_all_look_short():
    drawn = np.random.default_rng(1).lognormal(5, 0.6, 2000).clip(0, 999).astype(int)
    ended, going = drawn[drawn < 120], np.full((drawn >= 120).sum(), 120)
    assert learnt(ended).mean_tokens() < 0.7 * drawn.mean()
    assert learnt(ended, going).mean_tokens() > drawn.mean()


def test_the_oldest_ends_are_forgotten():
    lengths = learnt([100] * 50 + [500] * 50, history=50)
    assert lengths.mean_tokens() == pytest.approx(500, rel=0.05)


def test_a_group_whose_members_ended_early_is_expected_to_end_early_and_a_long_one_late():
    drawn = np.random.default_rng(2).lognormal(5, 0.6, 500).clip(0, 999).astype(int)
    lengths = LengthForecast(1000)
    short, usual, long = GroupStats(0), GroupStats(0), GroupStats(0)
    for size in drawn:
        lengths.end(GroupStats(0), int(size))
    for _ in range(4):
        lengths.end(short, 40)
    lengths.refresh(sizes(800, 800, 800), [long] * 3, [short, usual, long])
    at_a_mean = list(HORIZONS).index(0.9)
    held = [lengths.predict(sizes(0), [group])[0][at_a_mean] for group in (short, usual, long)]
    assert held[0] < 0.5 * held[1] < held[1] < 0.8 * held[2]


def test_what_is_held_now_is_known_and_a_trajectory_beyond_the_bound_is_about_to_end():
    lengths = learnt([200, 300, 400])
    rows_NH = lengths.predict(sizes(0, 150, 2000), [GroupStats(0)] * 3)
    assert rows_NH[:, 0].tolist() == [0, 150, 2000]
    assert rows_NH.dtype == np.int64
    assert lengths.expected_remaining(2000) < lengths.bin_tokens


def test_the_chance_over_groups_is_that_over_all():
    """A group of which nothing is known behaves as the mean over all groups."""
    lengths = learnt([100, 200, 300, 420] * 50)
    group = GroupStats(0)
    then_H = np.array(HORIZONS) * lengths.mean_tokens()
    alive_H = lengths.predict(sizes(0), [group])[0][1 : len(HORIZONS)] / then_H[1:]
    expected_H = [np.mean([size >= then for size in (100, 200, 300, 420)]) for then in then_H[1:]]
    assert alive_H == pytest.approx(expected_H, abs=0.06)
