"""Attention over trajectories that lie side by side in one row, each of which sees itself alone.

Promises
- A row gives each trajectory what it would get alone, and pairs of tokens of different trajectories cost nothing.
  (A dense mask over the row, which transformers makes with "sdpa", gives the same and costs the row's square.)
- On a GPU it is PyTorch's kernel for ragged lengths (bf16 or fp16). On the CPU it is one call per trajectory: of all
  that was tried the fastest (60 to 250 tokens each, one thread; a pass over sorted padded rows 1, this 0.84 to 0.92,
  padded inside the attention only 0.88 to 0.97, dense mask 1.2 to 2.5).

`register()` makes it known to transformers as `attn_implementation=PACKED`. Its callers give the model `bounds()`.

Shape legend: H heads, L tokens of the row, D width of a head, S trajectories.
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


def bounds(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Arguments of the model's forward pass; transformers' flash attention reads the same names.

    >>> bounds([2, 3], torch.device("cpu"))["cu_seq_lens_q"]
    tensor([0, 2, 5], dtype=torch.int32)
    """
    ends, longest = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device), max(lengths)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def packed_attention(
    module: nn.Module,
    query_1HLD: Tensor,
    key_1HLD: Tensor,
    value_1HLD: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: returns [1, L, H, D] and no weights.

    Raises ValueError for a model that keeps the bounds of the trajectories to itself (Nemotron), and for what would be
    left out: a window that cuts, a cap of the scores (softcap), sinks (s_aux). `algo.learner.model.load` asks once,
    with two tokens; a window is refused there by `algo.learner.supported`.
    """
    if cu_seq_lens_q is None:
        raise ValueError(
            f"{type(module).__name__} gives attention {PACKED!r} no bounds (cu_seq_lens_q) of the trajectories in a "
            "row. Fix: LearnerConfig(attention='sdpa')"
        )
    wanted = [name for name in ("softcap", "s_aux") if others.get(name) is not None]
    if sliding_window and sliding_window < max_length_q:
        wanted.append("sliding_window")
    if wanted:
        raise ValueError(
            f"{type(module).__name__} needs {' and '.join(wanted)}, which attention {PACKED!r} does not have. Fix: "
            "LearnerConfig(attention='sdpa') if transformers has it for this model, else another model"
        )
    if query_1HLD.is_cuda:
        heads = (state[0].transpose(0, 1) for state in (query_1HLD, key_1HLD, value_1HLD))
        ends, longest = (cu_seq_lens_q, cu_seq_lens_q), (max_length_q, max_length_q)
        return varlen_attn(*heads, *ends, *longest, scale=scaling, window_size=(-1, 0), **GROUPED)[None], None
    lengths = cu_seq_lens_q.diff().tolist()
    parts = zip(*(states.split(lengths, dim=2) for states in (query_1HLD, key_1HLD, value_1HLD)), strict=True)
    alone = [
        scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        for query, key, value in parts
    ]
    return torch.cat(alone, dim=2).transpose(1, 2), None
