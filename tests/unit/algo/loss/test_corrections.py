import math

import pytest
import torch
from hypothesis import strategies as st

from algo.loss.corrections import (
    geometric_ratios,
    icepop,
    no_outlier,
    product_ratios,
    token_ratios,
    within,
)

ratios = st.lists(st.floats(0.01, 100), min_size=1, max_size=12)


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
