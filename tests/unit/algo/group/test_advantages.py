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
    with pytest.raises(ValueError, match=rf"scale='{scales[1]}'.*'p0'"):
        make_batch(1, [group], advantage=Advantage(scale=scales[1]))


@pytest.mark.parametrize(
    ("field", "value"), [("baseline", "median"), ("scale", None), ("eps", -1e-6), ("eps", float("inf"))]
)
def test_an_advantage_names_its_wrong_field(field, value):
    with pytest.raises(ValueError, match=rf"Advantage\.{field} .*{value}"):
        Advantage(**{field: value})


REWARDS = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0], [0.5, 0.0, 2.0]]  # two flat groups among them
LENGTHS = [[10, 40, 30, 20], [5, 5, 5], [7, 9], [100, 1, 50]]


def sampled(rewards, lengths, number):
    """A group whose trajectories have so many sampled tokens."""
    group = graded(*rewards, number=number)
    members = [
        replace(
            member,
            token_ids_T=np.zeros(1 + length, np.int32),
            sampled_T=np.arange(1 + length) > 0,
            logprobs_T=np.zeros(1 + length, np.float32),
            versions_T=np.zeros(1 + length, np.int32),
        )
        for member, length in zip(group.trajectories, lengths, strict=True)
    ]
    return replace(group, trajectories=tuple(members))


def published(method):
    """The formula of the paper, in plain arithmetic over the lists above."""
    uneven = [(r, n) for r, n in zip(REWARDS, LENGTHS, strict=True) if len(set(r)) > 1]
    means = [sum(r) / len(r) for r, _ in uneven]
    match method:
        case "OPO":  # r - sum(n r) / sum(n), n the sampled tokens
            return [x - sum(a * b for a, b in zip(r, n, strict=True)) / sum(n) for r, n in uneven for x in r]
        case "MaxRL":  # (r - mean) / mean
            return [(x - mean) / mean for (r, _), mean in zip(uneven, means, strict=True) for x in r]
        case "REINFORCE++ with baseline":  # of the group first, then normalised over the batch
            found = [x - mean for (r, _), mean in zip(uneven, means, strict=True) for x in r]
        case "REINFORCE++":  # of the batch only
            found = [x for r in REWARDS for x in r]
    mean = sum(found) / len(found)
    deviation = (sum((x - mean) ** 2 for x in found) / (len(found) - 1)) ** 0.5
    return [(x - mean) / deviation for x in found]


@pytest.mark.parametrize(
    ("method", "advantage"),
    [
        ("OPO", Advantage(baseline="length", scale="none")),
        ("MaxRL", Advantage(scale="mean")),
        ("REINFORCE++ with baseline", Advantage(scale="batch")),
        ("REINFORCE++", Advantage(baseline="batch", scale="batch")),
    ],
)
def test_published_methods_are_their_formulas(method, advantage):
    groups = [sampled(*each, number) for number, each in enumerate(zip(REWARDS, LENGTHS, strict=True))]
    assert advantages_of(advantage, *groups) == pytest.approx(published(method), rel=1e-5, abs=1e-7)


def test_with_the_baseline_of_the_batch_a_group_of_one_is_trained_and_a_flat_batch_teaches_nothing():
    advantage = Advantage(baseline="batch", scale="batch")
    found = advantages_of(advantage, graded(1.0), graded(0.0, number=1), graded(0.0, number=2))
    assert found == pytest.approx([2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5], rel=1e-5)
    assert advantages_of(advantage, graded(*[0.1] * 6), graded(0.1, number=1)) == [0.0] * 7, "rounding of a mean"
    assert advantages_of(advantage, graded(0.7)) == [0.0]


def test_what_a_scale_or_baseline_cannot_take_is_refused():
    with pytest.raises(ValueError, match=r"Advantage\.scale .*'group'"):
        Advantage(baseline="batch")
    with pytest.raises(ValueError, match=r"rewards .*-1"):
        Advantage(scale="mean").of_group(np.asarray([1.0, -1.0]))
    with pytest.raises(ValueError, match="lengths"):
        Advantage(baseline="length").of_group(np.asarray([1.0, 0.0]))


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "length"])
@pytest.mark.parametrize("scale", ["group", "mean", "none"])
def test_a_group_of_one_has_exactly_no_advantage(baseline, scale):
    advantage = Advantage(baseline=baseline, scale=scale)
    assert advantage.of_group(np.asarray([1.0]), np.asarray([7])).tolist() == [0.0]
