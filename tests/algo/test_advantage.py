import numpy as np
import pytest
from algo_golden import name, rows
from hypothesis import given
from hypothesis import strategies as st

from algo.advantage import group_advantages, is_flat


@pytest.mark.parametrize("row", rows("group_advantage"), ids=name)
def test_matches_golden(row):
    inputs, params = row["inputs"], row["params"]
    rewards = np.asarray(inputs["rewards"])
    for group in set(inputs["group_ids"]):
        members = [index for index, other in enumerate(inputs["group_ids"]) if other == group]
        ours = group_advantages(rewards[members], divide_by_std=params["divide_by_std"])
        for index, advantage in zip(members, ours, strict=True):
            mask = np.asarray(inputs["response_mask"][index])
            # The peers pass the reward of a group of one through; it carries no signal and gets 0 here.
            expected = np.asarray(row["outputs"]["token_advantages"][index]) if len(members) > 1 else 0 * mask
            assert advantage * mask == pytest.approx(expected, rel=params["tol"], abs=params["tol"])


@pytest.mark.parametrize("row", rows("dynamic_sampling"), ids=name)
def test_flat_groups_match_golden(row):
    assert is_flat(np.asarray(row["inputs"]["rewards"])) is not row["outputs"]["keep"]


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


def test_refuses_what_is_not_a_group():
    with pytest.raises(ValueError, match="finite"):
        group_advantages(np.asarray([0.0, np.nan]))
    with pytest.raises(ValueError, match="one group"):
        group_advantages(np.zeros((2, 2)))
