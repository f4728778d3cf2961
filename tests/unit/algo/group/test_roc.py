import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algo.group.batch import make_batch, select_and_score
from algo.group.roc import RoC, draw, inclusion
from algo.group.selection import KeepAll, RandomSubset
from engine.types import Group
from tests.support.algo_fakes import trajectory

flags = st.lists(st.tuples(st.booleans(), st.sampled_from(["ok", "error", "timeout"])), max_size=40)


@given(flags, st.integers(1, 20), st.integers(0, 99))
def test_keeps_exactly_k_in_proportion_without_duplicates(kinds, keep, seed):
    group = [trajectory(reward=float(good), outcomes=(outcome,)) for good, outcome in kinds]
    kept = RoC(keep)(group, np.random.default_rng(seed))
    assert kept == RoC(keep)(group, np.random.default_rng(seed))
    assert kept == sorted(set(kept))
    assert len(kept) == min(keep, len(group))
    if len(group) > keep:
        negatives = [index for index, (good, _) in enumerate(kinds) if not good]
        assert sum(index in negatives for index in kept) == len(negatives) * keep // len(group)


def test_clean_positives_are_preferred():
    group = [trajectory(reward=1.0, outcomes=("error",)) for _ in range(8)]
    group += [trajectory(reward=1.0, outcomes=("ok",)) for _ in range(8)]
    rng, trials = np.random.default_rng(1), 300
    clean = sum(index >= 8 for _ in range(trials) for index in RoC(8)(group, rng)) / (8 * trials)
    control = sum(index >= 8 for _ in range(trials) for index in RandomSubset(8)(group, rng)) / (8 * trials)
    assert clean > 0.85
    assert 0.45 < control < 0.55


def test_a_single_failure_is_not_kept():
    group = [trajectory(reward=float(index > 0)) for index in range(16)]
    assert 0 not in RoC(8)(group, np.random.default_rng(0))


def test_other_selectors():
    group = [trajectory(reward=1.0) for _ in range(5)]
    assert KeepAll()(group, np.random.default_rng(0)) == [0, 1, 2, 3, 4]
    kept = RandomSubset(3)(group, np.random.default_rng(0))
    assert kept == sorted(set(kept))
    assert len(kept) == 3
    assert RandomSubset(9)(group, np.random.default_rng(0)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "chosen", [[0, 0, 1], [-3, 0, 1], [-1, 0], [True, False, True], [True, False], None, 1, [0, 7], [0.0, 1.0], ["0"]]
)
def test_a_selector_that_gives_other_than_different_indices_is_refused(chosen):
    """As a mask does, or a draw with replacement: it would be trained twice, and counted as sampled twice."""
    members = tuple(trajectory(reward=reward) for reward in (1.0, 0.0, 1.0))
    group = Group(prompt=members[0].prompt, trajectories=members, lease=0)
    assert select_and_score(lambda trajectories, rng: [2, 1], seed=0)(group).kept == (2, 1)
    with pytest.raises(ValueError, match=f"selector.*{re.escape(str(chosen))}"):
        select_and_score(lambda trajectories, rng: chosen, seed=0)(group)


def test_a_selector_cannot_sort_what_its_indices_are_of():
    members = tuple(trajectory(reward=reward) for reward in (1.0, 0.0, 1.0))
    group = Group(prompt=members[0].prompt, trajectories=members, lease=0)

    def best_two(trajectories, rng):
        trajectories.sort(key=lambda member: -member.reward)
        return [0, 1]

    with pytest.raises(AttributeError, match="sort"):
        select_and_score(best_two, seed=0)(group)


def test_what_another_temperature_sampled_is_not_trained():
    """Its log-probabilities are those of temperature 1: it was not sampled with these probabilities."""
    members = tuple(replace(trajectory(reward=reward), temperature=0.6) for reward in (1.0, 0.0))
    group = select_and_score(KeepAll(), seed=0)(Group(prompt=members[0].prompt, trajectories=members, lease=0))
    with pytest.raises(ValueError, match=r"temperature.*0\.6"):
        make_batch(1, [group])
    assert make_batch(1, [replace(group, kept=(), advantages_K=None, drop="easy")]).lengths_B.size == 0


def test_misuse_is_refused():
    for arguments in ({"keep": 0}, {"keep": 2, "smoothing": 0.0}):
        with pytest.raises(ValueError, match=r"RoC\."):
            RoC(**arguments)
    with pytest.raises(ValueError, match="keep"):
        RandomSubset(0)
    with pytest.raises(ValueError, match="ungraded"):
        RoC(1)([trajectory(), trajectory()], np.random.default_rng(0))


@given(st.lists(st.floats(0, 2), min_size=1, max_size=20), st.integers(0, 20))
def test_probabilities_of_being_kept_add_up_to_how_many_are_kept(penalties, count):
    chances = inclusion(np.asarray(penalties), 0.05, count)
    assert sum(chances) == pytest.approx(min(count, len(penalties)), abs=1e-4)
    assert ((chances >= -1e-9) & (chances <= 1 + 1e-9)).all()


def test_probabilities_are_those_of_the_draw():
    penalties_P, rng, trials = np.asarray([0.0, 0.0, 0.2, 0.5, 1.0, 1.5, 2.0]), np.random.default_rng(0), 20_000
    counts_P = np.zeros(len(penalties_P))
    for _ in range(trials):
        counts_P[draw(penalties_P, 0.05, 3, rng)] += 1
    np.testing.assert_allclose(inclusion(penalties_P, 0.05, 3), counts_P / trials, atol=0.015)


def test_roc_says_why_a_trajectory_is_kept_or_not():
    group = [trajectory(reward=1.0, outcomes=("ok",)), trajectory(reward=1.0, outcomes=("error",))] * 4
    group += [trajectory(reward=0.0)] * 8
    said = RoC(8).explain(group)
    assert [(each["p_err"], each["p_format"]) for each in said[:2]] == [(0.0, 0.0), (1.0, 0.0)]
    assert said[0]["probability"] > 0.9 > 0.1 > said[1]["probability"]
    assert said[-1]["probability"] == 0.5
    assert sum(each["probability"] for each in said) == pytest.approx(8, abs=1e-4)
    assert [each["probability"] for each in RoC(16).explain(group)] == [1.0] * 16


def test_a_selection_says_nothing_of_what_failed_or_was_given_up():
    members = [
        trajectory(reward=1.0),
        trajectory(reward=0.0),
        replace(trajectory(), error="gone"),
        trajectory(reward=0.0),
    ]
    group = Group(prompt=members[0].prompt, trajectories=tuple(members), lease=0)
    said = select_and_score(RandomSubset(2), seed=0).explain(group)
    assert [each.get("probability") for each in said] == [
        pytest.approx(2 / 3),
        pytest.approx(2 / 3),
        None,
        pytest.approx(2 / 3),
    ]
    ungraded = replace(group, trajectories=(trajectory(), trajectory()))
    assert select_and_score(RoC(1), seed=0).explain(ungraded) == [{}, {}]
    assert select_and_score(lambda trajectories, rng: [0], seed=0).explain(group) == [{}] * 4
