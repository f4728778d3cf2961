"""Keeps the optimizer's state in host memory while replicas have the GPU.

Invariants
- After `onload` every tensor is where it was, with the same bits.
- Host memory for a state is taken once, in one piece, and kept. It is pinned, so that copies run at the link's full
  speed and all at once; pinning takes longer than copying. PyTorch rounds each piece of pinned memory up to a power of
  two: for a 14B a piece a tensor would take 1.5 times the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

ALIGNED = 64  # bytes; each state begins at a cache line


class Away(NamedTuple):
    """A tensor that has left its device: `state[name]` is its copy in host memory."""

    state: dict[str, Any]
    name: str
    device: torch.device


class Offloader:
    """Moves an optimizer's state between its device and host memory."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._host: dict[tuple[int, str], Tensor] = {}  # state in host memory, by parameter and name
        self._away: list[Away] = []

    def offload(self) -> int:
        """Moves every state tensor that is on a device to the host; returns how many bytes were moved."""
        leaving = [
            (Away(state, name, value.device), (id(parameter), name))
            for parameter, state in self._optimizer.state.items()
            for name, value in state.items()
            if isinstance(value, Tensor) and value.device.type != "cpu"
        ]
        self._take_memory([(key, away.state[away.name]) for away, key in leaving if key not in self._host])
        moved_bytes = 0
        for away, key in leaving:
            value = away.state[away.name]
            _local(self._host[key]).copy_(_local(value), non_blocking=True)
            away.state[away.name] = self._host[key]
            moved_bytes += value.nbytes
            self._away.append(away)
        self._wait()
        return moved_bytes

    def _take_memory(self, values: Sequence[tuple[tuple[int, str], Tensor]]) -> None:
        """Takes host memory for these values, by parameter and name."""
        sizes = [_local(value).nbytes for _, value in values]
        aligned = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        memory = torch.empty(sum(aligned), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        for (key, value), size, part in zip(values, sizes, memory.split(aligned), strict=True):
            self._host[key] = _like(value, part[:size])

    def onload(self) -> None:
        """Moves back what `offload` moved."""
        for state, name, device in self._away:
            state[name] = state[name].to(device, non_blocking=True)
        self._wait()
        self._away.clear()

    def _wait(self) -> None:
        for device in {away.device for away in self._away if away.device.type == "cuda"}:
            torch.cuda.synchronize(device)


@torch.no_grad()
def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _like(value: Tensor, memory: Tensor) -> Tensor:
    """Returns memory (uint8) as a tensor like this one. A sharded tensor stays sharded, with its shard there."""
    shard = memory.view(value.dtype).view(_local(value).shape)
    if not isinstance(value, DTensor):
        return shard
    host = torch.empty_like(value, device="cpu")
    host._local_tensor = shard
    return host
