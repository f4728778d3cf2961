import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algo.loss.aggregate import over_sequence
from algo.loss.corrections import (
    geometric_ratios,
    icepop,
    no_outlier,
    normalised,
    normalised_by_sequence,
    product_ratios,
    token_ratios,
    within,
)

ratios = st.lists(st.floats(0.01, 100), min_size=1, max_size=12)


@given(ratios, st.integers(0, 99))
def test_normalised_weights_have_mean_one_and_keep_their_proportions(values, seed):
    weights_M = torch.tensor(values, dtype=torch.float64)
    sequence_M = torch.randint(0, 4, (len(values),), generator=torch.Generator().manual_seed(seed))
    ours_M = normalised(weights_M)
    assert ours_M.mean().item() == pytest.approx(1)
    assert (ours_M / weights_M).tolist() == pytest.approx([ours_M[0].item() / values[0]] * len(values))
    constant_M = over_sequence(weights_M, sequence_M, 4, "mean")[sequence_M]
    by_sequence = over_sequence(normalised_by_sequence(constant_M, sequence_M, 4), sequence_M, 4, "mean")
    assert by_sequence[sequence_M.unique()].mean().item() == pytest.approx(1)


def test_weights_of_nothing_and_weights_that_are_all_zero_stay():
    nothing, segments = torch.zeros(0), (torch.zeros(0, dtype=torch.long), 3)
    assert normalised(nothing).tolist() == normalised_by_sequence(nothing, *segments).tolist() == []
    assert product_ratios(nothing, nothing, *segments).tolist() == []
    assert no_outlier(nothing, *segments, lower=0.5).tolist() == []
    assert normalised(torch.zeros(2)).tolist() == [0, 0]


def test_weights_carry_no_gradient_and_bounds_belong_to_the_kept_range():
    logprobs = torch.zeros(2, requires_grad=True)
    segments = (torch.zeros(2, dtype=torch.long), 1)
    for weights in (
        token_ratios(logprobs, torch.ones(2)),
        product_ratios(logprobs, torch.ones(2), *segments),
        geometric_ratios(logprobs, torch.ones(2), *segments),
    ):
        assert not weights.requires_grad
    values = torch.tensor([0.4, 0.5, 2.0, 2.1])
    assert within(values, 0.5, 2.0).tolist() == [False, True, True, False]
    assert within(values).tolist() == [True] * 4
    assert icepop(values, 0.5, 2.0).tolist() == [0, 0.5, 2.0, 0]


def test_the_ratio_of_a_long_sequence_stays_finite():
    logprobs_M, segments = torch.full((1000,), -1.0), (torch.zeros(1000, dtype=torch.long), 1)
    assert product_ratios(logprobs_M, logprobs_M - 1, *segments).tolist() == pytest.approx([math.exp(20)] * 1000)
    assert product_ratios(logprobs_M - 1, logprobs_M, *segments).tolist() == pytest.approx([math.exp(-20)] * 1000)
    assert geometric_ratios(logprobs_M, logprobs_M - 1, *segments).tolist() == pytest.approx([math.e] * 1000)


def test_one_outlier_vetoes_its_sequence_only():
    ratios_M, sequence_M = torch.tensor([1.0, 1e-5, 1.0, 200.0]), torch.tensor([0, 0, 1, 2])
    assert no_outlier(ratios_M, sequence_M, 3, lower=1e-4).tolist() == [False, False, True, True]
    assert no_outlier(ratios_M, sequence_M, 3, lower=1e-4, upper=100).tolist() == [False, False, True, False]
