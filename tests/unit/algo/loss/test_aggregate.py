import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algo.loss.aggregate import choose, mean_of_means, over_sequence, total
from tests.support.golden import numbers


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 99))
def test_parts_add_up_to_the_whole_however_sequences_are_dealt_out(lengths, seed):
    sequence_M = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    losses_M = torch.randn(len(sequence_M), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    part_S = torch.arange(len(lengths)) % 2
    whole = [total(losses_M, 7), mean_of_means(losses_M, sequence_M, len(lengths), 3)]
    for part in (0, 1):
        losses, sequence = choose(part_S[sequence_M] == part, losses_M, sequence_M)
        whole[0] = whole[0] - total(losses, 7)
        whole[1] = whole[1] - mean_of_means(losses, sequence, len(lengths), 3)
    assert [difference.item() for difference in whole] == pytest.approx([0, 0], abs=1e-12)


def test_an_absent_sequence_is_zero_and_a_negative_maximum_stays_negative():
    values_M, sequence_M = torch.tensor([-2.0, -1.0, 4.0]), torch.tensor([0, 0, 2])
    assert over_sequence(values_M, sequence_M, 4, "max").tolist() == [-1, 0, 4, 0]
    assert over_sequence(values_M, sequence_M, 4, "mean").tolist() == [-1.5, 0, 4, 0]
    assert over_sequence(values_M, sequence_M, 4, "sum").tolist() == [-3, 0, 4, 0]


def test_choosing_keeps_the_gradient_of_masked_infinities_at_zero():
    values = torch.tensor([1.0, numbers("nan"), numbers("inf")], requires_grad=True)
    (kept,) = choose(torch.tensor([1, 0, 0]), values)
    kept.exp().sum().backward()
    assert values.grad.tolist() == pytest.approx([math.e, 0, 0])
