import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algo.group.advantages import group_advantages


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
