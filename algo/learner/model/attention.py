"""Attention over trajectories that lie side by side in one row, each of which sees itself alone.

Invariants
- A row gives each trajectory what it would get alone, and pairs of tokens of different trajectories cost nothing. (A
  dense mask over the row, which transformers makes with "sdpa", gives the same and costs the row's square.)
- If trajectories share their beginning, the row has it once, and each of them sees it before its own tokens.
- A layer that looks back a limited number of tokens (sliding_window) does so, at a cost linear in the length.
- A model's sinks (s_aux) take part in the softmax of each trajectory (`algo.learner.model.sinks`).
- On a GPU it is PyTorch's kernel for ragged lengths (bf16 or fp16). On the CPU it is one call per trajectory, which was
  the fastest of all variants that we tried (60 to 250 tokens each, one thread; a pass over sorted padded rows takes 1,
  this 0.84 to 0.92, padding inside the attention only 0.88 to 0.97, a dense mask 1.2 to 2.5).

`register()` makes it known to transformers as `attn_implementation=PACKED`. Its callers give the model `bounds()`.

Shape legend: H heads, L tokens of the row, K keys (L, and shared tokens once more for each trajectory), D width of a
head, S trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from algo.learner.model.context import RowPart
from algo.learner.model.sinks import GROUPED, CpuKernel, RaggedKernel, with_sinks

PACKED = "packed"


def register() -> None:
    """Registers the attention with transformers; repeated calls change nothing."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, window_of_mask)


def activate(kernels: str, device: str) -> None:
    """Makes PyTorch use these kernels ("FA3") for packed attention on GPUs. Raises ValueError where they are missing.

    Source: torch.nn.attention.activate_flash_attention_impl, a prototype in PyTorch 2.13. Not yet run on a GPU.
    """
    use = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    try:
        if use is None:
            raise RuntimeError(f"PyTorch {torch.__version__} cannot choose kernels, 2.13 can")
        if device != "cuda":
            raise RuntimeError(f"it runs on Hopper GPUs (H100, H200), and the device is {device!r}")
        use(kernels)
        if (major := torch.cuda.get_device_capability()[0]) != 9:
            raise RuntimeError(f"it runs on Hopper GPUs (compute capability 9), and this one has {major}")
    except (ImportError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"LearnerConfig.flash_attention must be 'FA2' here, got {kernels!r}: {error}. Fix: install "
            "flash_attn_interface (FlashAttention's folder hopper/) on a Hopper GPU, or leave 'FA2'"
        ) from error


def window_of_mask(*, local_size: int | None = None, **_others: Any) -> Tensor | None:
    """Returns the window of a kind of layer in place of its mask, or None. This is transformers' interface of masks."""
    return None if local_size is None else torch.tensor(local_size)


def bounds(lengths: Sequence[int], device: torch.device, shared: int = 0) -> dict[str, Any]:
    """Returns the arguments of the model's forward pass; transformers' flash attention reads the same names.

    lengths: those of the trajectories in the row. shared: how many tokens at the row's beginning all of them continue.

    >>> bounds([2, 3], torch.device("cpu"))["cu_seq_lens_q"]
    tensor([0, 2, 5], dtype=torch.int32)
    >>> bounds([2, 1], torch.device("cpu"), shared=3)["key_index_K"]
    tensor([0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5])
    """
    queries = [shared, *lengths] if shared else [*lengths]
    keys = [shared, *(shared + length for length in lengths)] if shared else queries
    arguments = {
        "cu_seq_lens_q": torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=device),
        "cu_seq_lens_k": torch.tensor([0, *accumulate(keys)], dtype=torch.int32, device=device),
        "max_length_q": max(queries),
        "max_length_k": max(keys),
    }
    if shared:
        before = torch.arange(shared)
        own = torch.arange(shared, shared + sum(lengths)).split(list(lengths))
        pieces = [before, *(piece for tokens in own for piece in (before, tokens))]
        arguments["key_index_K"] = torch.cat(pieces).to(device)
    return arguments


def packed_attention(
    module: nn.Module,
    query_1HLD: Tensor,
    key_1HLD: Tensor,
    value_1HLD: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int = 0,
    max_length_k: int = 0,
    key_index_K: Tensor | None = None,
    row_part: RowPart | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Returns [1, L, H, D] and no weights, by transformers' interface. attention_mask: the window (`window_of_mask`).

    row_part: where ranks share the row, what this rank has of it: the states are those of its positions alone.
    s_aux: the layer's sinks, one for each head of queries.

    Raises ValueError for a model that does not pass the bounds of the trajectories on (Nemotron), for one whose layers
    and masks disagree on the window, for a cap of the scores (softcap), which would be left out, and on a GPU or with
    sinks for values of another width than queries (multi-head latent attention).
    `algo.learner.model.loading.load` asks once, with two tokens.
    """
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise ValueError(
            f"{type(module).__name__} gives attention {PACKED!r} no bounds (cu_seq_lens_q) of the trajectories in a "
            "row. Fix: LearnerConfig(attention='sdpa')"
        )
    wanted = ["softcap"] if others.get("softcap") is not None else []
    own_mask = attention_mask is not None and attention_mask.numel() > 1
    if own_mask or sliding_window != (None if attention_mask is None else int(attention_mask)):
        wanted.append("a mask of its own")
    if wanted:
        raise ValueError(
            f"{type(module).__name__} needs {' and '.join(wanted)}, which attention {PACKED!r} does not have. Fix: "
            "LearnerConfig(attention='sdpa') if transformers has it for this model, else another model"
        )
    if row_part is not None:
        query_1HLD, key_1HLD, value_1HLD = row_part.by_heads(query_1HLD, key_1HLD, value_1HLD)
        s_aux = None if s_aux is None else row_part.own_heads(s_aux)
    if key_index_K is not None:
        key_1HLD, value_1HLD = (states.index_select(2, key_index_K) for states in (key_1HLD, value_1HLD))
    window = sliding_window if sliding_window and sliding_window < max_length_k else None
    on_cpu = query_1HLD.device.type == "cpu"
    if value_1HLD.shape[-1] != query_1HLD.shape[-1] and not (on_cpu and s_aux is None):
        where = "with sinks" if on_cpu else "on a GPU"
        raise ValueError(
            f"{type(module).__name__} has values of another width than queries ({value_1HLD.shape[-1]} and "
            f"{query_1HLD.shape[-1]}), which attention {PACKED!r} does not take {where}. "
            "Fix: LearnerConfig(attention='sdpa')"
        )
    if not on_cpu:
        ends, longest = (cu_seq_lens_q, cu_seq_lens_k), (max_length_q, max_length_k)
        span = (window - 1 if window else -1, 0)  # how many tokens before and after itself a token sees
        if s_aux is not None:
            kernel = RaggedKernel(ends=ends, longest=longest, scale=scaling, span=span)
            output_1LHD = with_sinks(query_1HLD, key_1HLD, value_1HLD, s_aux, kernel).transpose(1, 2)
        else:
            heads = (state[0].transpose(0, 1) for state in (query_1HLD, key_1HLD, value_1HLD))
            output_1LHD = varlen_attn(*heads, *ends, *longest, scale=scaling, window_size=span, **GROUPED)[None]
        return output_1LHD if row_part is None else row_part.by_positions(output_1LHD), None
    key_lengths = cu_seq_lens_k.diff().tolist()
    queries = query_1HLD.split(cu_seq_lens_q.diff().tolist(), dim=2)
    keys, values = key_1HLD.split(key_lengths, dim=2), value_1HLD.split(key_lengths, dim=2)
    alone = [
        _causal(query, key, value, s_aux, window=window, scale=scaling)
        for query, key, value in zip(queries, keys, values, strict=True)
        if query.shape[2]  # a trajectory that is all shared has no tokens of its own
    ]
    output_1LHD = torch.cat(alone, dim=2).transpose(1, 2)
    return output_1LHD if row_part is None else row_part.by_positions(output_1LHD), None


def _causal(
    query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor | None, *, window: int | None, scale: float | None
) -> Tensor:
    """Returns the attention of one trajectory, whose last query belongs to its last key.

    With a window, blocks of as many queries as the window is wide see the keys that any query of the block sees.
    """
    queries, keys = query.shape[2], key.shape[2]
    if window is None or window >= keys:
        if queries == keys:
            return _attend(query, key, value, sinks_H, scale=scale, mask=None)
        window = keys
    before = keys - queries
    blocks = []
    for start in range(0, queries, window):
        end = min(start + window, queries)
        first, last = max(0, before + start - window + 1), before + end
        offset = before + start - first
        seen = torch.ones(end - start, last - first, dtype=torch.bool).tril(offset).triu(offset - window + 1)
        of_keys = key[:, :, first:last], value[:, :, first:last]
        blocks.append(_attend(query[:, :, start:end], *of_keys, sinks_H, scale=scale, mask=seen))
    return torch.cat(blocks, dim=2)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor | None, *, scale: float | None, mask: Tensor | None
) -> Tensor:
    """Returns attention on the CPU. mask: which keys each query sees; None: those up to its own."""
    if sinks_H is not None:
        return with_sinks(query, key, value, sinks_H, CpuKernel(scale=scale, mask=mask))
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
