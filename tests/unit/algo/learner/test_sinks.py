"""Attention sinks in packed rows against plain attention in which a sink is one more column of the scores."""

from itertools import pairwise

import pytest
import torch
from torch.library import Library

from algo.learner.model.attention import bounds, packed_attention
from algo.learner.model.sinks import CpuKernel, RaggedKernel, with_sinks

HEADS, KEY_HEADS, WIDTH, SCALE = 4, 2, 8, 0.4


def states(tokens, dtype=torch.float32):
    """Queries, keys and values of a row, and sinks that take about as much as the keys."""
    random = torch.Generator().manual_seed(0)
    sizes = [(1, heads, tokens, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    made = [torch.randn(size, generator=random, dtype=torch.float64) for size in sizes]
    sinks = 1 + torch.randn(HEADS, generator=random, dtype=torch.float64)
    return [each.to(dtype).requires_grad_() for each in (*made, sinks)]


def plain(query, key, value, sinks, window):
    """One trajectory, whose last query belongs to its last key."""
    queries, keys, groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if window:
        seen = seen.triu(keys - queries - window + 1)
    scores = (query @ key.transpose(2, 3) * SCALE).masked_fill(~seen, -torch.inf)
    column = sinks.view(1, -1, 1, 1).expand(1, -1, queries, 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value


def alone(query, key, value, sinks, lengths, window, shared=0):
    """[1, L, H, D]: each trajectory by itself, after what all of them begin with."""
    own = torch.arange(shared, shared + sum(lengths)).split(lengths)
    rows = [torch.arange(shared)] if shared else []
    parts = [(each, torch.cat([torch.arange(shared), each])) for each in own if len(each)]
    parts = [(each, each) for each in rows] + parts
    outputs = [
        plain(query[:, :, queries], key[:, :, keys], value[:, :, keys], sinks, window) for queries, keys in parts
    ]
    return torch.cat(outputs, 2).transpose(1, 2)


def gradients(output, given):
    """What the output and the gradients of all that was given are, for one loss of the output."""
    weights = torch.cos(torch.arange(output.numel(), dtype=torch.float64)).view(output.shape)
    return [output.detach(), *torch.autograd.grad((output * weights.to(output.dtype)).sum(), given)]


def assert_same(found, expected, bound=2e-6):
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= bound * other.norm()


@pytest.mark.parametrize("window", [None, 1, 4, 9, 50])
@pytest.mark.parametrize(
    ("lengths", "shared"), [([11], 0), ([1, 7, 3], 0), ([3, 0, 2], 4), ([5, 9], 1)], ids=["one", "row", "shared", "few"]
)
def test_a_row_has_the_output_and_gradients_of_each_trajectory_alone(lengths, shared, window):
    tokens = shared + sum(lengths)
    given, row = states(tokens), bounds(lengths, torch.device("cpu"), shared)
    query, key, value, sinks = given
    mask = None if window is None else torch.tensor(window)
    output, _ = packed_attention(
        None, query, key, value, mask, **row, scaling=SCALE, sliding_window=window, s_aux=sinks
    )
    exact = states(tokens, torch.float64)
    assert_same(gradients(output, given), gradients(alone(*exact, lengths, window, shared), exact))


def test_a_sink_far_below_the_scores_changes_nothing_and_one_far_above_takes_all():
    query, key, value, _ = states(6)
    row = bounds([6], torch.device("cpu"))
    none, _ = packed_attention(None, query, key, value, None, **row)
    low, _ = packed_attention(None, query, key, value, None, **row, s_aux=torch.full((HEADS,), -100.0))
    high, _ = packed_attention(None, query, key, value, None, **row, s_aux=torch.full((HEADS,), 100.0))
    torch.testing.assert_close(low, none)
    assert high.abs().max() < 1e-30


def test_frozen_sinks_leave_the_other_gradients_as_they_are():
    given = states(9)
    row = bounds([4, 5], torch.device("cpu"))
    query, key, value, sinks = given
    trained, _ = packed_attention(None, query, key, value, None, **row, s_aux=sinks)
    frozen, _ = packed_attention(None, query, key, value, None, **row, s_aux=sinks.detach())
    for one, other in zip(gradients(frozen, given[:3]), gradients(trained, given)[:4], strict=True):
        assert torch.equal(one, other)


def test_bfloat16_states_give_what_float32_ones_give_up_to_their_rounding():
    given = [each.detach().bfloat16().requires_grad_() for each in states(40)]
    row = bounds([25, 15], torch.device("cpu"))
    query, key, value, sinks = given
    output, _ = packed_attention(None, query, key, value, torch.tensor(8), **row, sliding_window=8, s_aux=sinks)
    exact = [each.detach().double().requires_grad_() for each in given]
    found = gradients(output, given)
    assert all(each.dtype == torch.bfloat16 for each in found)
    query, key, value, sinks = exact
    scaled = [query * WIDTH**-0.5 / SCALE, key, value, sinks]
    assert_same(found, gradients(alone(*scaled, [25, 15], 8), exact), bound=1e-2)


def test_values_of_another_width_are_refused():
    query, key, value, sinks = states(3)
    row = bounds([3], torch.device("cpu"))
    with pytest.raises(ValueError, match=r"values of another width.*with sinks.*attention='sdpa'"):
        packed_attention(None, query, key, value[..., :4], None, **row, s_aux=sinks)


def test_memory_grows_with_the_length_and_not_with_its_square():
    kept = {}
    for tokens in (200, 400):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda each, sizes=sizes: sizes.append(each) or each, lambda x: x
        ):
            query, key, value, sinks = states(tokens)
            with_sinks(query, key, value, sinks, CpuKernel(scale=SCALE, mask=None))
        kept[tokens] = sum(each.numel() for each in sizes)
    assert kept[400] < 2.01 * kept[200]


def scored(query, key, causal, scale, left, right):
    """Scores of one trajectory [H, L, K], by the arguments of FlashAttention."""
    queries, keys = query.shape[0], key.shape[0]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal or right == 0:
        seen = seen.tril(keys - queries)
    if left >= 0:
        seen = seen.triu(keys - queries - left)
    return (torch.einsum("lhd,khd->hlk", query, key) * scale).masked_fill(~seen, -torch.inf)


def trajectories(ends_of_queries, ends_of_keys):
    pairs = (pairwise(ends.tolist()) for ends in (ends_of_queries, ends_of_keys))
    return [(slice(*queries), slice(*keys)) for queries, keys in zip(*pairs, strict=True)]


def dense_forward(query, key, value, ends_q, ends_k, longest_q, longest_k, dropout, causal, debug, *, scale, **given):
    assert (longest_q, longest_k) == tuple(int(ends.diff().max()) for ends in (ends_q, ends_k))
    output, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query), dtype=torch.float32)
    span = given["window_size_left"], given["window_size_right"]
    for queries, keys in trajectories(ends_q, ends_k):
        scores = scored(query[queries], key[keys], causal, scale, *span)
        values = value[keys].repeat_interleave(query.shape[1] // key.shape[1], 1)
        lse[:, queries] = scores.logsumexp(-1).float()
        output[queries] = torch.einsum("hlk,khd->lhd", scores.softmax(-1), values)
    state = torch.zeros(2, dtype=torch.uint64)
    return output, lse, state, state, query.new_empty(0)


def dense_backward(
    grad, query, key, value, output, lse, ends_q, ends_k, longest_q, longest_k, dropout, causal, state, unused, **given
):
    """FlashAttention's backward pass: probabilities are exp(score - lse), which it is given."""
    assert all(each.is_contiguous() for each in (grad, output, lse))
    d_query, d_key, d_value = (torch.zeros_like(each) for each in (query, key, value))
    groups, scale = query.shape[1] // key.shape[1], given["scale"]
    span = given["window_size_left"], given["window_size_right"]
    for queries, keys in trajectories(ends_q, ends_k):
        shares = (scored(query[queries], key[keys], causal, scale, *span) - lse[:, queries, None]).exp().to(query.dtype)
        all_keys, values = (each[keys].repeat_interleave(groups, 1) for each in (key, value))
        of_shares = torch.einsum("lhd,khd->hlk", grad[queries], values)
        means = torch.einsum("lhd,lhd->hl", grad[queries], output[queries])
        of_scores = shares * (of_shares - means[..., None]) * scale
        d_query[queries] = torch.einsum("hlk,khd->lhd", of_scores, all_keys)
        for total, own in (
            (d_key, torch.einsum("hlk,lhd->khd", of_scores, query[queries])),
            (d_value, torch.einsum("hlk,lhd->khd", shares, grad[queries])),
        ):
            total[keys] += own.unflatten(1, (-1, groups)).sum(2)
    return d_query, d_key, d_value


@pytest.fixture
def flash_attention():
    """Gives FlashAttention's two operators of ragged rows, which exist on GPUs alone, an implementation on the CPU."""
    library = Library("aten", "IMPL")
    library.impl("_flash_attention_forward", dense_forward, "CPU")
    library.impl("_flash_attention_backward", dense_backward, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("lengths", "shared"), [([11], 0), ([1, 7, 3], 0), ([3, 2], 4)], ids=["one", "row", "shared"])
def test_the_kernel_for_ragged_rows_has_the_output_and_gradients_of_each_trajectory_alone(
    flash_attention, lengths, shared, window
):
    tokens = shared + sum(lengths)
    given, row = states(tokens, torch.float64), bounds(lengths, torch.device("cpu"), shared)
    query, key, value, sinks = given
    index = row.get("key_index_K", torch.arange(tokens))
    kernel = RaggedKernel(
        ends=(row["cu_seq_lens_q"], row["cu_seq_lens_k"]),
        longest=(row["max_length_q"], row["max_length_k"]),
        scale=SCALE,
        span=(window - 1 if window else -1, 0),
    )
    output = with_sinks(query, key.index_select(2, index), value.index_select(2, index), sinks, kernel)
    exact = states(tokens, torch.float64)
    found = gradients(output.transpose(1, 2), given)
    assert_same(found, gradients(alone(*exact, lengths, window, shared), exact), bound=1e-6)
