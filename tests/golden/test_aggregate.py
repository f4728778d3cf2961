"""Averages over tokens and sequences against the peers."""

import math

import torch

from algo.loss.aggregate import mean_of_means, total
from tests.support.golden import Chosen, check, expected, over, rows


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


@over(rows("aggregate"))
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
