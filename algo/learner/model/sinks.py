"""Attention sinks: a learnt logit of each head takes part in the softmax over the keys and has no value (gpt-oss).

PyTorch's fast kernels of attention have no sinks, but they return the logarithm of each softmax's sum (lse), and their
backward pass takes it. With lse' = logaddexp(lse, sink) a query's output is that of the kernel times exp(lse - lse').
The kernel's backward pass, which computes probabilities as exp(score - lse'), gives the exact gradients of queries,
keys and values if it gets lse' and the new output. That of a sink is minus the sum over its queries of
exp(sink - lse') <gradient, output>.

Invariants
- Memory is that of the kernel: no matrix of scores is held.
- The same code surrounds the kernels of the CPU and of GPUs.

Shape legend: H heads of queries, L tokens of the row, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import AuxRequest, varlen_attn

# PyTorch 2.11 takes fewer heads of keys than of queries by itself; later versions need this argument.
GROUPED = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


class Kernel(Protocol):
    """Attention without sinks. States are [1, heads, tokens, D], and lse is [1, H, L] in fp32."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (output, lse)."""

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of queries, keys and values."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CpuKernel:
    """PyTorch's flash attention on the CPU, of one trajectory or a block of it."""

    scale: float | None
    mask: Tensor | None
    """Which keys each query sees, [queries, keys]; None: each sees those up to its own."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, self.mask is None, attn_mask=self._added(query), scale=self.scale
        )
        return output, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        states, causal, mask = (query, key, value, output, lse), self.mask is None, self._added(query)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *states, 0.0, causal, attn_mask=mask, scale=self.scale
        )
        return gradients

    def _added(self, query: Tensor) -> Tensor | None:
        """Returns what is added to the scores."""
        if self.mask is None:
            return None
        return torch.zeros(self.mask.shape, dtype=query.dtype).masked_fill_(~self.mask, -torch.inf)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RaggedKernel:
    """PyTorch's kernel for ragged lengths, of a whole row on a GPU.

    Its forward pass is public. Its backward pass is the operator that PyTorch's own autograd calls, which has the same
    arguments in 2.11 and 2.13.
    """

    ends: tuple[Tensor, Tensor]
    """Where each trajectory's queries and keys end in the row, from 0 on."""
    longest: tuple[int, int]
    scale: float | None
    span: tuple[int, int]
    """How many tokens before and after itself a token sees; -1: all of them."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        output_LHD, lse_HL = varlen_attn(
            *_by_tokens(query, key, value),
            *self.ends,
            *self.longest,
            return_aux=AuxRequest(lse=True),
            scale=self.scale,
            window_size=self.span,
            **GROUPED,
        )
        return output_LHD.transpose(0, 1)[None], lse_HL[None]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        gradients = torch.ops.torch_attn._varlen_attn_backward(
            grad[0].transpose(0, 1).contiguous(),
            *_by_tokens(query, key, value),
            output[0].transpose(0, 1).contiguous(),
            lse[0].contiguous(),
            *self.ends,
            *self.longest,
            self.span == (-1, 0),
            no_dropout,
            self.scale,
            list(self.span),
        )
        d_query, d_key, d_value = (gradient.transpose(0, 1)[None] for gradient in gradients)
        return d_query, d_key, d_value


def _by_tokens(*states: Tensor) -> list[Tensor]:
    return [each[0].transpose(0, 1) for each in states]


def with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor, kernel: Kernel) -> Tensor:
    """Returns the attention [1, H, L, D] of states [1, heads, tokens, D] with a sink for each head of queries."""
    output: Tensor = _WithSinks.apply(query, key, value, sinks_H, kernel)
    return output


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor, kernel: Kernel) -> Tensor:
        alone, lse_of_keys = kernel.forward(query, key, value)
        assert lse_of_keys.shape == query.shape[:-1], f"lse is {tuple(lse_of_keys.shape)}, and not [1, H, L]"
        lse = torch.logaddexp(lse_of_keys.float(), sinks_H.float()[:, None])
        # Into a tensor of its dtype, so that none of float32 is made on the way.
        output = torch.mul(alone, (lse_of_keys - lse).exp()[..., None], out=torch.empty_like(alone))
        ctx.save_for_backward(query, key, value, sinks_H, output, lse)
        ctx.kernel = kernel
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks_H, output, lse = ctx.saved_tensors
        of_states = ctx.kernel.backward(grads[0], query, key, value, output, lse)
        of_sinks = None
        if ctx.needs_input_grad[3]:
            share = (sinks_H.float()[:, None] - lse).exp()
            of_sinks = -(share * (grads[0].float() * output.float()).sum(-1)).sum((0, 2)).to(sinks_H.dtype)
        return *of_states, of_sinks, None
