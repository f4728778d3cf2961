"""Attention over trajectories that lie side by side in one row, each of which sees itself alone.

Promises
- A row gives each trajectory what it would get alone, and pairs of tokens of different trajectories cost nothing.
  (A dense mask over the row, which transformers makes with "sdpa", gives the same and costs the row's square.)
- Where trajectories share their beginning, the row has it once, and each of them sees it before its own tokens.
- On a GPU it is PyTorch's kernel for ragged lengths (bf16 or fp16). On the CPU it is one call per trajectory: of all
  that was tried the fastest (60 to 250 tokens each, one thread; a pass over sorted padded rows 1, this 0.84 to 0.92,
  padded inside the attention only 0.88 to 0.97, dense mask 1.2 to 2.5).

`register()` makes it known to transformers as `attn_implementation=PACKED`. Its callers give the model `bounds()`.

Shape legend: H heads, L tokens of the row, K keys (L, and shared tokens once more for each trajectory), D width of a
head, S trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

PACKED = "packed"
# PyTorch 2.11 takes fewer heads of keys than of queries without being told; later ones ask for a word.
GROUPED = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def register() -> None:
    """Idempotent."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, lambda *_args, **_kwargs: None)


def bounds(lengths: Sequence[int], device: torch.device, shared: int = 0) -> dict[str, Any]:
    """Arguments of the model's forward pass; transformers' flash attention reads the same names.

    lengths: of the trajectories in the row. shared: how many tokens at the row's beginning all of them go on from.

    >>> bounds([2, 3], torch.device("cpu"))["cu_seq_lens_q"]
    tensor([0, 2, 5], dtype=torch.int32)

    >>> bounds([2, 1], torch.device("cpu"), shared=3)["key_index_K"]
    tensor([0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5])
    """
    queries = [shared, *lengths] if shared else [*lengths]
    keys = [shared, *(shared + length for length in lengths)] if shared else queries
    found = {
        "cu_seq_lens_q": torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=device),
        "cu_seq_lens_k": torch.tensor([0, *accumulate(keys)], dtype=torch.int32, device=device),
        "max_length_q": max(queries),
        "max_length_k": max(keys),
    }
    if shared:
        before = torch.arange(shared)
        own = torch.arange(shared, shared + sum(lengths)).split(list(lengths))
        pieces = [before, *(piece for tokens in own for piece in (before, tokens))]
        found["key_index_K"] = torch.cat(pieces).to(device)
    return found


def packed_attention(
    module: nn.Module,
    query_1HLD: Tensor,
    key_1HLD: Tensor,
    value_1HLD: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int = 0,
    max_length_k: int = 0,
    key_index_K: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: returns [1, L, H, D] and no weights.

    Raises ValueError for a model that keeps the bounds of the trajectories to itself (Nemotron), and for what would be
    left out: a window that cuts, a cap of the scores (softcap), sinks (s_aux). `algo.learner.model.load` asks once,
    with two tokens; a window is refused there by `algo.learner.supported`.
    """
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise ValueError(
            f"{type(module).__name__} gives attention {PACKED!r} no bounds (cu_seq_lens_q) of the trajectories in a "
            "row. Fix: LearnerConfig(attention='sdpa')"
        )
    wanted = [name for name in ("softcap", "s_aux") if others.get(name) is not None]
    if sliding_window and sliding_window < max_length_k:
        wanted.append("sliding_window")
    if wanted:
        raise ValueError(
            f"{type(module).__name__} needs {' and '.join(wanted)}, which attention {PACKED!r} does not have. Fix: "
            "LearnerConfig(attention='sdpa') if transformers has it for this model, else another model"
        )
    if key_index_K is not None:
        key_1HLD, value_1HLD = (states.index_select(2, key_index_K) for states in (key_1HLD, value_1HLD))
    if query_1HLD.is_cuda:
        heads = (state[0].transpose(0, 1) for state in (query_1HLD, key_1HLD, value_1HLD))
        ends, longest = (cu_seq_lens_q, cu_seq_lens_k), (max_length_q, max_length_k)
        return varlen_attn(*heads, *ends, *longest, scale=scaling, window_size=(-1, 0), **GROUPED)[None], None
    query_lengths, key_lengths = cu_seq_lens_q.diff().tolist(), cu_seq_lens_k.diff().tolist()
    queries = query_1HLD.split(query_lengths, dim=2)
    keys, values = key_1HLD.split(key_lengths, dim=2), value_1HLD.split(key_lengths, dim=2)
    alone = [
        scaled_dot_product_attention(query, key, value, **_causal(query, key), scale=scaling, enable_gqa=True)
        for query, key, value in zip(queries, keys, values, strict=True)
        if query.shape[2]
    ]
    return torch.cat(alone, dim=2).transpose(1, 2), None


def _causal(query: Tensor, key: Tensor) -> dict[str, Any]:
    """Each query sees the keys up to its own; the last query's is the last key."""
    queries, keys = query.shape[2], key.shape[2]
    if queries == keys:
        return {"is_causal": True}
    return {"attn_mask": torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)}
