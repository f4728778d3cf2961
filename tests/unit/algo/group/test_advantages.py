from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algo.group.advantages import Advantage, group_advantages
from algo.group.batch import make_batch, select_and_score
from algo.group.selection import KeepAll
from engine.types import Group
from tests.support.algo_fakes import trajectory

RLOO = Advantage(baseline="leave_one_out", scale="none")


def test_flat_group_is_exactly_zero_where_float_noise_would_not_be():
    assert np.std([0.1] * 7) > 0
    assert group_advantages(np.full(7, 0.1)).tolist() == [0.0] * 7
    assert group_advantages(np.asarray([0.7])).tolist() == [0.0]
    assert group_advantages(np.zeros(0)).tolist() == []


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20))
def test_centred_and_of_unit_deviation(rewards):
    advantages = group_advantages(np.asarray(rewards))
    assert abs(advantages.sum()) < 1e-6
    assert np.std(advantages, ddof=1) <= 1.0 + 1e-9


def test_leaving_oneself_out_compares_with_the_mean_of_the_others():
    rewards = np.asarray([1.0, 0.0, 0.5, 0.0])
    others = [np.delete(rewards, index).mean() for index in range(4)]
    ours = group_advantages(rewards, divide_by_std=False, leave_one_out=True)
    assert ours == pytest.approx(rewards - others)


def test_refuses_what_is_not_a_group():
    with pytest.raises(ValueError, match="finite"):
        group_advantages(np.asarray([0.0, np.nan]))
    with pytest.raises(ValueError, match="one group"):
        group_advantages(np.zeros((2, 2)))


def graded(*rewards, number=0):
    """A group as the rollouts hand it over, of a prompt of its own."""
    members = [trajectory(reward=reward) for reward in rewards]
    prompt = replace(members[0].prompt, id=f"p{number}")
    return Group(prompt=prompt, trajectories=tuple(replace(each, prompt=prompt) for each in members), lease=number)


def advantages_of(advantage, *groups):
    """What the learner is sent, through the functions that a recipe uses."""
    select = select_and_score(KeepAll(), seed=0, advantage=advantage)
    return make_batch(1, [select(group) for group in groups], advantage=advantage).advantages_B.tolist()


GROUPS = graded(1.0, 0.0, 0.0), graded(1.0, 1.0, number=1), graded(4.0, 0.0, number=2)  # the second one is flat


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (Advantage(), [2 / 3 / 3**-0.5, -1 / 3 / 3**-0.5, -1 / 3 / 3**-0.5, 2 / 8**0.5, -2 / 8**0.5]),
        (Advantage(scale="none"), [2 / 3, -1 / 3, -1 / 3, 2.0, -2.0]),
        (RLOO, [1.0, -0.5, -0.5, 4.0, -4.0]),
        (
            Advantage(eps=1.0),
            [
                2 / 3 / (1 + 3**-0.5),
                -1 / 3 / (1 + 3**-0.5),
                -1 / 3 / (1 + 3**-0.5),
                2 / (1 + 8**0.5),
                -2 / (1 + 8**0.5),
            ],
        ),
    ],
)
def test_a_recipe_chooses_baseline_scale_and_eps(advantage, expected):
    assert advantages_of(advantage, *GROUPS) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_the_scale_of_the_batch_is_that_of_all_that_is_trained(baseline):
    """Centred within the groups: (2 -1 -1)/3 and (2 -2), or 3/2 and 2 times as far out."""
    centred = advantages_of(Advantage(baseline=baseline, scale="none"), *GROUPS)
    found = advantages_of(Advantage(baseline=baseline, scale="batch", eps=0.5), *GROUPS)
    assert found == pytest.approx([value / (np.std(centred, ddof=1) + 0.5) for value in centred], rel=1e-6)


def test_nothing_is_trained_of_a_batch_of_flat_groups_at_any_scale():
    for scale in ("group", "batch", "none"):
        assert advantages_of(Advantage(scale=scale), graded(1.0, 1.0), graded(0.0, 0.0, number=1)) == []


@pytest.mark.parametrize("scales", [("batch", "group"), ("group", "batch"), ("batch", "none")])
def test_two_functions_that_were_told_different_scales_are_refused(scales):
    """Else a batch would be trained undivided, or divided twice."""
    group = select_and_score(KeepAll(), seed=0, advantage=Advantage(scale=scales[0]))(GROUPS[0])
    with pytest.raises(ValueError, match=rf"Advantage\.scale is '{scales[1]}' for make_batch .*'p0'"):
        make_batch(1, [group], advantage=Advantage(scale=scales[1]))


@pytest.mark.parametrize(
    ("field", "value"), [("baseline", "median"), ("scale", None), ("eps", -1e-6), ("eps", float("inf"))]
)
def test_an_advantage_names_its_wrong_field(field, value):
    with pytest.raises(ValueError, match=rf"Advantage\.{field} must be .*{value}"):
        Advantage(**{field: value})
