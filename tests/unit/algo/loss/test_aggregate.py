import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algo.loss.aggregate import choose, mean_of_means, over_sequence, total
from tests.support.golden import Chosen, check, expected, name, numbers, rows


def aggregated(params, row, losses_M):
    """The peer's mode, with its own idea of what is a count and what is left to the caller."""
    tokens, nonempty = max(1, int(row.mask_BT.sum())), max(1, int(row.mask_BT.any(1).sum()))
    ranks = params.get("dp_size", 1)  # verl multiplies by it, since its gradients are averaged over the ranks
    sequences = params.get("global_batch_size", nonempty)
    rows_B, columns = row.mask_BT.shape
    definition = params["definition"]
    if definition in ("token-mean", "token_mean"):
        return ranks * total(losses_M, params.get("batch_num_tokens", tokens))
    if definition == "token_mean_legacy":  # the mean over microbatches of their token means
        size = params["micro_batch_size"]
        return mean_of_means(losses_M, row.sequence_M // size, rows_B, math.ceil(rows_B / size))
    if definition == "seq-mean-token-sum":
        return ranks * total(losses_M, sequences)
    if definition == "seq-mean-token-mean":
        return ranks * mean_of_means(losses_M, row.sequence_M, rows_B, sequences)
    if definition == "sequence_mean":  # an empty sequence counts
        return mean_of_means(losses_M, row.sequence_M, rows_B, rows_B)
    if definition == "seq-mean-token-sum-norm":  # verl: not divided by the number of sequences, no ranks
        return total(losses_M, params.get("loss_scale_factor", columns))
    if definition == "seq_mean_token_sum_norm":
        return total(losses_M, rows_B * params["max_seq_len"])
    if definition == "prompt_mean":
        prompt_of = [prompt for prompt, (low, high) in enumerate(params["prompt_boundaries"]) for _ in range(low, high)]
        prompts = len(params["prompt_boundaries"])
        return mean_of_means(losses_M, torch.tensor(prompt_of)[row.sequence_M], prompts, prompts)
    if definition == "sum-of-seq-token-means":
        return mean_of_means(losses_M, row.sequence_M, rows_B, 1)
    assert definition == "sum-of-tokens"
    return total(losses_M, 1)


@pytest.mark.parametrize("row", rows("aggregate"), ids=name)
def test_matches_golden_in_value_and_gradient(row):
    params, outputs = row["params"], expected(row)
    chosen = Chosen.of(row, leaf="loss_matrix")
    loss = aggregated(params, chosen, chosen.logprobs_BT[chosen.mask_BT])
    if not chosen.mask_BT.any():
        assert loss.item() == 0  # verl: NaN
        return
    check(loss, outputs["loss"], params["tol"])
    if "grad" in outputs:
        chosen.check_gradient(loss, outputs["grad"], params["tol"])


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
